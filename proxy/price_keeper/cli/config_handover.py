"""Hands a reloaded configuration from the supervisor to its workers.

The supervisor reads and checks the file once, and publishes the text that it checked in a directory that nobody else can
open. Workers apply that text: when they come to read, the file itself may have changed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from price_keeper.config import Config, parse_config, read_config_file
from price_keeper.config.config_changes import apply_reloadable, compare_catalogs, list_restart_keys
from price_keeper.config_reload import log, log_rejection, log_restart_keys
from price_keeper.errors import ConfigError

_FILE_NAME = "configuration"


class ConfigHandover:
    """Each worker has a copy of it as it was when the worker was made, and reads on from there."""

    def __init__(self, config: Config, path: Path, environ: Mapping[str, str], folder: Path) -> None:
        self.config = config  # the one in force
        self._path = path
        self._environ = environ
        self._folder = folder
        self._accepted_text = ""  # of the one in force, once one was passed on
        self._accepted_number = self._latest_number = (
            0  # which one that is, and which was the last, of all that were read
        )

    # The supervisor's.

    def publish(self) -> bool:
        """Whether there is something for the workers to read. Nothing that goes wrong here may end the supervisor."""
        try:
            text = read_config_file(self._path)
            parsed = parse_config(text, str(self._path), self._environ)
            self._write_handover(text, is_accepted=True)
        except ConfigError as failure:
            log_rejection(failure.problems)
            return self._publish_refusal()
        except Exception as failure:  # of whatever kind
            log_rejection([f"it cannot be passed on: {type(failure).__name__}: {failure}"])
            return False
        before, self.config = self.config, apply_reloadable(self.config, parsed)
        log.warning("SIGHUP: labels and prices are passed on to the workers: %s", compare_catalogs(before, self.config))
        log_restart_keys(list_restart_keys(self.config, parsed))
        return True

    def _publish_refusal(self) -> bool:
        """So that they can tell who asks them."""
        try:
            self._write_handover(self._accepted_text, is_accepted=False)
        except OSError:
            return False
        return True

    def _write_handover(self, text: str, *, is_accepted: bool) -> None:
        """One that a worker has not come to read stays there beside a refusal of the next."""
        number = self._latest_number + 1
        accepted_number = number if is_accepted else self._accepted_number
        new = self._folder / f"{_FILE_NAME}.new"
        new.write_text(json.dumps([accepted_number, text, number]), "utf-8")
        os.replace(new, self._folder / _FILE_NAME)
        self._accepted_text, self._accepted_number, self._latest_number = text, accepted_number, number

    # A worker's.

    @property
    def is_refused(self) -> bool:
        """What was read last is not what this worker has."""
        return self._latest_number > self._accepted_number

    def read_new_config(self) -> Config | None:
        """To be asked until it is None, which is that there is nothing new: hang-ups of a terminal reach workers as
        well. Raises ConfigError for a refusal, of which the supervisor has told."""
        try:
            accepted_number, text, latest_number = json.loads((self._folder / _FILE_NAME).read_text("utf-8"))
        except FileNotFoundError:
            return None
        if accepted_number > self._accepted_number:
            self._accepted_number = self._latest_number = accepted_number
            self.config = apply_reloadable(self.config, parse_config(text, str(self._path), self._environ))
            return self.config
        if latest_number > self._latest_number:
            self._latest_number = latest_number
            raise ConfigError([])
        return None
