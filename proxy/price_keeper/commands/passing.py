"""A configuration on its way to running workers: the supervisor reads and checks it, and all of them take on that one.

What is passed on is the text that was checked, in the folder that nobody else can open: by the time a worker reads the
file itself, it may say something else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from price_keeper.config import Config, parse_config, read_config_file
from price_keeper.config.renewal import compare_catalogs, list_restart_keys, apply_reloadable
from price_keeper.errors import ConfigError
from price_keeper.reloading import log, log_restart_keys, log_rejection

_NAME = "configuration"


class Passing:
    """Each worker has a copy of it as it was when the worker was made, and reads on from there."""

    def __init__(self, config: Config, path: Path, environ: Mapping[str, str], folder: Path) -> None:
        self.config = config  # the one in force
        self._path = path
        self._environ = environ
        self._folder = folder
        self._text = ""  # of the one in force, once one was passed on
        self._good = self._last = 0  # which one that is, and which was the last, of all that were read

    # The supervisor's.

    def pass_on(self) -> bool:
        """Whether there is something for the workers to read. Nothing that goes wrong here may end the supervisor."""
        try:
            text = read_config_file(self._path)
            found = parse_config(text, str(self._path), self._environ)
            self._tell_workers(text, is_good=True)
        except ConfigError as failure:
            log_rejection(failure.problems)
            return self._are_told_of_refusal()
        except Exception as failure:  # of whatever kind
            log_rejection([f"it cannot be passed on: {type(failure).__name__}: {failure}"])
            return False
        before, self.config = self.config, apply_reloadable(self.config, found)
        log.warning("SIGHUP: labels and prices are passed on to the workers: %s", compare_catalogs(before, self.config))
        log_restart_keys(list_restart_keys(self.config, found))
        return True

    def _are_told_of_refusal(self) -> bool:
        """So that they can tell who asks them."""
        try:
            self._tell_workers(self._text, is_good=False)
        except OSError:
            return False
        return True

    def _tell_workers(self, text: str, *, is_good: bool) -> None:
        """One that a worker has not come to read stays there beside a refusal of the next."""
        last = self._last + 1
        good = last if is_good else self._good
        new = self._folder / f"{_NAME}.new"
        new.write_text(json.dumps([good, text, last]), "utf-8")
        os.replace(new, self._folder / _NAME)
        self._text, self._good, self._last = text, good, last

    # A worker's.

    @property
    def is_refused(self) -> bool:
        """What was read last is not what this worker has."""
        return self._last > self._good

    def passed_on(self) -> Config | None:
        """To be asked until it is None, which is that there is nothing new: hang-ups of a terminal reach workers as
        well. Raises ConfigError for a refusal, of which the supervisor has told."""
        try:
            good, text, last = json.loads((self._folder / _NAME).read_text("utf-8"))
        except FileNotFoundError:
            return None
        if good > self._good:
            self._good = self._last = good
            self.config = apply_reloadable(self.config, parse_config(text, str(self._path), self._environ))
            return self.config
        if last > self._last:
            self._last = last
            raise ConfigError([])
        return None
