"""Reload the configuration on SIGHUP: labels and prices are applied as a whole, or not at all.

The file is read and checked in a thread. Each part that depends on labels or prices first prepares what it needs; then
all of them are switched in one iteration of the event loop, so no call sees half of a configuration. If anything fails,
the running configuration stays in force, and log, metrics and readiness say so. Start with `ConfigReloader`.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias

from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_changes import apply_reloadable, compare_catalogs, join_few, list_restart_keys
from price_keeper.control.readiness_checks import ReadinessChecks
from price_keeper.errors import ConfigError
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.workers import reload_signal

# Returns None if the file is unchanged. Raises ConfigError. Runs in a thread, because a large file takes long.
ReadConfig: TypeAlias = "Callable[[], Config | None]"
ApplyConfig: TypeAlias = "Callable[[], None]"
PrepareConfig: TypeAlias = "Callable[[Config], Awaitable[ApplyConfig]]"

CONFIG_REFUSED_TEXT: Final = "the last reload was rejected; the previous configuration stays in force"

THREAD_SWITCH_SECONDS: Final = 0.0005  # a tenth of Python's default; see `_prioritize_event_loop`

_log = logging.getLogger("price_keeper.reloading")


class _LoadedConfig(NamedTuple):
    config: Config  # the running configuration with the reloadable parts of the new one
    changes: str
    restart_keys: list[str]


class ConfigReloader:
    """Handles SIGHUP from its construction on; a signal that arrives before `start` is handled in `start`."""

    def __init__(
        self, config: Config, read_config: ReadConfig | None, clock: Clock, *, is_reload_rejected: bool = False
    ) -> None:
        """`read_config` is None if the configuration did not come from a file. `is_reload_rejected`: the last reload,
        before this process was started, was rejected, so `config` is older than the file."""
        self.config = config
        self._read_config = read_config
        self._clock = clock
        self._tasks: Tasks | None = None
        self._prepare_steps: list[PrepareConfig] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.request_reload)
        self._is_requested = reload_signal.take_reload_request()
        self._is_reloading = self._is_stopped = False
        self._last_applied_at = clock.now()
        self._is_reload_rejected = is_reload_rejected
        self._results = {"taken": 0, "refused": 0}

    def register_metrics(self, telemetry: MetricsRegistry) -> None:
        telemetry.add(metrics.RELOADS, lambda: [({"result": result}, n) for result, n in self._results.items()])
        telemetry.add(metrics.CONFIGURATION_REFUSED, lambda: float(self._is_reload_rejected))
        telemetry.add(metrics.CONFIGURATION_TAKEN_TIMESTAMP, lambda: self._last_applied_at)

    def add_step(self, prepare: PrepareConfig) -> None:
        """Add a part that depends on the configuration. Parts are prepared and switched in the order of these calls."""
        self._prepare_steps.append(prepare)

    def build_checks(self) -> ReadinessChecks:
        """Readiness checks. After a rejected reload the process keeps serving, and a check reports the rejection."""

        async def refused() -> str:
            return CONFIG_REFUSED_TEXT

        return {"configuration": refused} if self._is_reload_rejected else {}

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._start_if_requested()

    def stop(self) -> None:
        """Ignore reloads from now on; the process is draining."""
        self._is_stopped = True

    def request_reload(self) -> None:
        if self._is_stopped:
            _log.warning("SIGHUP ignored: the process is stopping")
        else:
            self._is_requested = True
            self._start_if_requested()

    def _start_if_requested(self) -> None:
        """Runs one reload at a time. A request during a reload may follow a newer version of the file, so the file is
        then read once more."""
        if self._is_requested and self._tasks is not None and not self._is_reloading and not self._is_stopped:
            self._is_reloading, self._is_requested = True, False
            self._tasks.spawn(self._reload())

    async def _reload(self) -> None:
        try:
            await self._try_reload()
        finally:
            self._is_reloading = False
            self._start_if_requested()

    async def _try_reload(self) -> None:
        if self._read_config is None:
            _log.warning("SIGHUP ignored: this process has no configuration file to read again")
            return
        try:
            with _prioritize_event_loop():
                loaded = await asyncio.to_thread(_load_changes, self._read_config, self.config)
                if loaded is None:
                    return
                apply_steps = [await prepared(loaded.config) for prepared in self._prepare_steps]
        except ConfigError as failure:
            self._reject(failure.problems)
            return
        except Exception as failure:  # of any kind: the running configuration must stay in force
            if self._is_stopped:
                return
            self._reject([f"it cannot be applied: {type(failure).__name__}: {failure}"])
            return
        if self._is_stopped:
            return
        self.config = loaded.config
        for apply in apply_steps:
            apply()
        self._is_reload_rejected, self._last_applied_at = False, self._clock.now()
        self._results["taken"] += 1
        _log.warning("SIGHUP: labels and prices reloaded: %s", loaded.changes)
        log_restart_keys(loaded.restart_keys)

    def _reject(self, problems: Sequence[str]) -> None:
        self._is_reload_rejected = True
        self._results["refused"] += 1
        log_rejection(problems)


def _load_changes(read_config: ReadConfig, running: Config) -> _LoadedConfig | None:
    loaded = read_config()
    if loaded is None:
        return None
    effective = apply_reloadable(running, loaded)
    return _LoadedConfig(effective, str(compare_catalogs(running, effective)), list_restart_keys(running, loaded))


@contextmanager
def _prioritize_event_loop() -> Iterator[None]:
    """Shorten the interval after which a busy thread yields the GIL. Reading the largest file keeps a thread busy for
    seconds, in which each iteration of the event loop would otherwise start 5 ms late."""
    normal_interval = sys.getswitchinterval()
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(normal_interval)


def log_rejection(problems: Sequence[str]) -> None:
    for problem in problems:
        _log.error("SIGHUP: configuration rejected; the previous one stays in force: %s", problem)


def log_restart_keys(keys: list[str]) -> None:
    if keys:
        _log.warning("SIGHUP: these changes need a restart: %s", join_few(keys))


def build_budget_reload(budgets: BudgetRegistry) -> PrepareConfig:
    """Apply the labels to the budgets. Logs the scopes whose chain names a label that was removed: their budgets use
    the rest of the chain."""

    async def prepare(config: Config) -> ApplyConfig:
        return lambda: _apply_to_budgets(budgets, config)

    return prepare


def _apply_to_budgets(budgets: BudgetRegistry, config: Config) -> None:
    removed = budgets.labels.keys() - config.labels.keys()
    budgets.apply_config(config.labels)
    for label, states in budgets.find_using_labels(removed).items():
        message = "SIGHUP: label %s is no longer configured; it is skipped in the model_ordering of %s"
        _log.warning(message, label, join_few(state.scope.key for state in states))
