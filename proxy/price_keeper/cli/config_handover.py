"""Hands a reloaded configuration from the supervisor to its workers.

The supervisor reads and checks the file once, and publishes the checked text in a directory that only this user can
open. Workers apply that text, since the file itself may change again before they read it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from price_keeper.config import Config, parse_config, read_config_file
from price_keeper.config.config_changes import apply_reloadable, compare_catalogs, list_restart_keys
from price_keeper.config_reload import log_rejection, log_restart_keys
from price_keeper.errors import ConfigError

_FILE_NAME = "configuration"

_log = logging.getLogger("price_keeper.reloading")


class ConfigHandover:
    """The supervisor's end and, in each forked copy, a worker's end of the handover.

    A worker starts with the state at its fork and applies what is published after it.
    """

    def __init__(self, config: Config, path: Path, environ: Mapping[str, str], folder: Path) -> None:
        self.config = config  # the configuration in force
        self._path = path
        self._environ = environ
        self._folder = folder
        self._accepted_text = ""  # the text in force, once one was published
        # Reload attempts are numbered: the last one that was accepted, and the last one at all.
        self._accepted_number = self._latest_number = 0

    # Called by the supervisor.

    def publish(self) -> bool:
        """Read, check and publish the file. True if workers must be signalled. No failure may end the supervisor."""
        try:
            text = read_config_file(self._path)
            parsed = parse_config(text, str(self._path), self._environ)
            self._write_handover(text, is_accepted=True)
        except ConfigError as failure:
            log_rejection(failure.problems)
            return self._publish_refusal()
        except Exception as failure:  # no failure may end the supervisor
            log_rejection([f"it cannot be handed to the workers: {type(failure).__name__}: {failure}"])
            return False
        before, self.config = self.config, apply_reloadable(self.config, parsed)
        _log.warning("SIGHUP: labels and prices are handed to the workers: %s", compare_catalogs(before, self.config))
        log_restart_keys(list_restart_keys(self.config, parsed))
        return True

    def _publish_refusal(self) -> bool:
        """Publish a refusal, so that workers can distinguish the supervisor's signal from a terminal's SIGHUP."""
        try:
            self._write_handover(self._accepted_text, is_accepted=False)
        except OSError:
            return False
        return True

    def _write_handover(self, text: str, *, is_accepted: bool) -> None:
        """A refusal keeps the last accepted text, which some worker may not have read yet."""
        number = self._latest_number + 1
        accepted_number = number if is_accepted else self._accepted_number
        new = self._folder / f"{_FILE_NAME}.new"
        new.write_text(json.dumps([accepted_number, text, number]), "utf-8")
        os.replace(new, self._folder / _FILE_NAME)
        self._accepted_text, self._accepted_number, self._latest_number = text, accepted_number, number

    # Called by a worker.

    @property
    def is_reload_rejected(self) -> bool:
        """Whether the last reload was rejected, so that this worker keeps its configuration."""
        return self._latest_number > self._accepted_number

    def read_new_config(self) -> Config | None:
        """The next published configuration, or None if there is nothing new. Call it until it returns None.

        None is also the answer to a terminal's SIGHUP, which reaches workers as well as the supervisor. Raises an empty
        ConfigError for a refused reload, whose problems the supervisor has logged.
        """
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
