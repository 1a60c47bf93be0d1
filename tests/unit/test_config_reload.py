"""SIGHUP, one at a time: read, prepared by all parts, and then applied by all of them or by none."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from price_keeper.config import Config
from price_keeper.config_reload import CONFIG_REFUSED_TEXT, THREAD_SWITCH_SECONDS, ConfigReloader
from price_keeper.errors import ConfigError
from price_keeper.tasks import Tasks
from price_keeper.telemetry.metrics import MetricsRegistry
from price_keeper.workers import reload_signal

from tests.support.clock import ManualClock
from tests.support.raw_clients import eventually

CONFIG = Config.development()


@dataclass
class Rig:
    clock: ManualClock
    tasks: Tasks
    reloading: ConfigReloader
    reads: list[Any] = field(default_factory=list)  # what the next ones come to
    read: int = 0
    taken: list[tuple[str, Config]] = field(default_factory=list)
    trouble: Exception | None = None  # of the second part
    gate: threading.Event = field(default_factory=threading.Event)
    intervals: list[float] = field(default_factory=list)

    def found(self) -> Config | None:
        assert threading.current_thread() is not threading.main_thread()
        self.read += 1
        self.intervals.append(sys.getswitchinterval())
        assert self.gate.wait(10)
        came = self.reads.pop(0) if self.reads else CONFIG
        if isinstance(came, Exception):
            raise came
        return came

    def part(self, name: str, trouble: Callable[[], Exception | None] = lambda: None) -> None:
        async def prepared(config: Config) -> Callable[[], None]:
            failure = trouble()
            if failure is not None:
                raise failure
            return lambda: self.taken.append((name, config))

        self.reloading.add_step(prepared)

    async def asked(self) -> None:
        before = self.read
        signal.raise_signal(signal.SIGHUP)
        await eventually(lambda: self.read > before)
        await self.over()

    async def over(self) -> None:
        await eventually(lambda: not self.reloading._is_reloading and not self.reloading._is_requested)

    def metrics(self) -> dict[str, float]:
        telemetry = MetricsRegistry()
        self.reloading.register_metrics(telemetry)
        lines = [line for line in telemetry.render_own().splitlines() if line[0] != "#"]
        return {line.split()[0].removeprefix("price_keeper_"): float(line.split()[1]) for line in lines}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = ManualClock()
    async with Tasks(clock) as tasks:
        rig = Rig(clock, tasks, None)  # type: ignore[arg-type]
        rig.gate.set()
        rig.reloading = ConfigReloader(CONFIG, rig.found, clock)
        rig.part("one")
        rig.part("two", lambda: rig.trouble)
        yield rig
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


def priced(usd: int) -> Config:
    return replace(CONFIG, labels={"only": replace(CONFIG.labels["premium"], model=f"m{usd}")})


async def test_reload_is_applied_by_all_parts(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.reloading.start(rig.tasks)
    began = rig.clock.now()
    await rig.clock.advance(7)
    rig.reads = [replace(priced(1), on_store_down="refuse")]
    usual = sys.getswitchinterval()
    await rig.asked()
    assert rig.taken == [("one", priced(1)), ("two", priced(1))]
    assert rig.reloading.config == priced(1)
    assert (rig.intervals, sys.getswitchinterval()) == ([pytest.approx(THREAD_SWITCH_SECONDS)], usual)
    assert rig.metrics() == {
        'reloads_total{result="taken"}': 1,
        'reloads_total{result="refused"}': 0,
        "configuration_refused": 0,
        "configuration_taken_timestamp_seconds": began + 7,
    }
    assert [record.getMessage() for record in caplog.records] == [
        "SIGHUP: labels and prices reloaded: added: only; removed: premium, standard, economy",
        "SIGHUP: these changes need a restart: on_store_down",
    ]


@pytest.mark.parametrize(
    "trouble",
    [
        ConfigError(["config.yaml:3: labels: one", "config.yaml:4: labels: two"]),
        OSError(5, "the disk"),
        RuntimeError("of whatever kind"),
    ],
)
@pytest.mark.parametrize("whose", ["reading", "second part"])
async def test_failing_part_prevents_reload_everywhere(
    rig: Rig, trouble: Exception, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.reloading.start(rig.tasks)
    if whose == "reading":
        rig.reads = [trouble]
    else:
        rig.reads, rig.trouble = [priced(1)], trouble
    await rig.asked()
    assert rig.taken == []
    assert rig.reloading.config == CONFIG
    problems = trouble.problems if isinstance(trouble, ConfigError) else [str(trouble)]
    assert len(caplog.records) == len(problems)
    assert all(problem in record.getMessage() for problem, record in zip(problems, caplog.records, strict=True))
    assert all(record.levelno == logging.ERROR and record.exc_info is None for record in caplog.records)
    checks = rig.reloading.build_checks()
    assert await checks["configuration"]() == CONFIG_REFUSED_TEXT
    assert rig.metrics()["configuration_refused"] == 1
    rig.trouble = None
    await rig.asked()
    assert (rig.reloading.build_checks(), rig.metrics()["configuration_refused"]) == ({}, 0)
    assert sys.getswitchinterval() > THREAD_SWITCH_SECONDS


async def test_start_after_refused_reload_reports_it_until_next_success(rig: Rig) -> None:
    rig.reloading = ConfigReloader(CONFIG, rig.found, rig.clock, is_reload_rejected=True)
    rig.reloading.start(rig.tasks)
    assert await rig.reloading.build_checks()["configuration"]() == CONFIG_REFUSED_TEXT
    assert (rig.metrics()["configuration_refused"], rig.metrics()['reloads_total{result="refused"}']) == (1, 0)
    await rig.asked()
    assert (rig.reloading.build_checks(), rig.metrics()["configuration_refused"]) == ({}, 0)


async def test_reload_requests_during_reload_cause_one_more(rig: Rig) -> None:
    rig.reloading.start(rig.tasks)
    rig.gate.clear()
    rig.reads = [priced(1), priced(2), priced(3)]
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.read == 1)
    for _ in range(5):
        signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.reloading._is_requested)
    rig.gate.set()
    await rig.over()
    assert [config for _, config in rig.taken] == [priced(1), priced(1), priced(2), priced(2)]


async def test_reload_requested_before_start_runs_after_it(rig: Rig) -> None:
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.reloading._is_requested)
    assert rig.read == 0
    rig.reloading.start(rig.tasks)
    await rig.over()
    assert rig.read == 1


async def test_signal_before_event_loop_is_remembered(rig: Rig) -> None:
    kept = signal.getsignal(signal.SIGHUP)
    try:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        reload_signal.record_reload_signals()
        signal.raise_signal(signal.SIGHUP)
        reloading = ConfigReloader(CONFIG, rig.found, rig.clock)
        reloading.start(rig.tasks)
        await eventually(lambda: rig.read == 1)
        assert not reload_signal.take_reload_request()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, kept)


async def test_reload_while_stopping_is_ignored(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.reloading.start(rig.tasks)
    rig.gate.clear()
    rig.reads = [priced(1)]
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.read == 1)
    rig.reloading.stop()
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: caplog.text)
    rig.gate.set()
    await rig.over()
    assert (rig.read, rig.taken) == (1, [])
    assert [record.getMessage() for record in caplog.records] == ["SIGHUP ignored: the process is stopping"]


async def test_queued_reload_is_dropped_when_stopping(rig: Rig) -> None:
    """Nothing begins while the loop ends."""
    rig.reloading.start(rig.tasks)
    rig.gate.clear()
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.read == 1)
    signal.raise_signal(signal.SIGHUP)
    await eventually(lambda: rig.reloading._is_requested)
    rig.reloading.stop()
    (reload,) = rig.tasks._spawned
    rig.gate.set()
    await asyncio.wait([reload])  # its callbacks run one turn of the loop after its last line
    assert not rig.tasks._spawned
    assert (rig.read, rig.taken) == (1, [])


async def test_unchanged_configuration_is_neither_applied_nor_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.reloading.start(rig.tasks)
    rig.reads = [None]
    await rig.asked()
    assert (rig.taken, caplog.text) == ([], "")
    assert rig.metrics()['reloads_total{result="taken"}'] == rig.metrics()['reloads_total{result="refused"}'] == 0
