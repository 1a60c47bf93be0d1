"""From the outbox to the receiver: how often, for how long, and what happens to alerts that are never accepted."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from price_keeper.alerts import alert_outbox as outbox_module
from price_keeper.alerts.alert import Alert
from price_keeper.alerts.alert_delivery import GIVE_UP_SECONDS, MAX_CONCURRENT_REQUESTS, MAX_RETRY_SECONDS
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.alerts.alert_raiser import SETTLE_SECONDS
from price_keeper.alerts.webhook import WebhookResponse
from price_keeper.domain import Scope
from price_keeper.tasks import Tasks

from tests.support.alerts import (
    ACCEPTED,
    DAY,
    USD,
    CrashingProcess,
    ScriptedAlertStore,
    ScriptedReceiver,
    files,
    scope,
    write_leftover,
)
from tests.support.clock import ManualClock, settle
from tests.support.raw_clients import eventually

ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
AWAY = WebhookResponse(None, "away")
ALERT = Alert("id-1", Scope(ORG, "my-app"), "premium", DAY.key, DAY.end, 80, 8 * USD, 10 * USD, 1_795_003_200)


@pytest.fixture
async def tasks(clock: ManualClock) -> AsyncIterator[Tasks]:
    async with Tasks(clock) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "alerts"


def process(
    folder: Path,
    clock: ManualClock,
    tasks: Tasks,
    *answers: WebhookResponse,
    rows: ScriptedAlertStore | None = None,
    **how: Any,
) -> tuple[CrashingProcess, ScriptedReceiver]:
    receiver = ScriptedReceiver(*answers)
    return CrashingProcess(folder, rows or ScriptedAlertStore(), receiver, clock, tasks, **how), receiver


async def test_alert_content_round_trips_through_disk() -> None:
    assert Alert.from_content(ALERT.content()) == ALERT
    whole = replace(ALERT, scope=Scope(ORG), label="a.b-c_d", spent_pico=10**30)
    assert Alert.from_content(replace(whole, spent_pico=10**18).content()) == replace(whole, spent_pico=10**18)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'"x"', ALERT.content()[:-1], ALERT.content().replace(b"premium", b"a#b")]
    + [ALERT.content().replace(b'"ends_at":1795046400', b'"ends_at":' + bad) for bad in (b'"x"', b"null", b"1e30")]
    + [ALERT.content().replace(b"ORG#6f", b"ORG#zz"), ALERT.content().replace(b'"id"', b'"name"')],
)
async def test_file_without_valid_alert_is_left_in_place(folder: Path, content: bytes) -> None:
    write_leftover(folder, f"{ALERT.file_stem}.json", content)
    outbox = AlertOutbox(folder)
    await outbox.open()
    assert outbox.names == {ALERT.file_stem}
    assert await outbox.read(ALERT.file_stem) is None
    assert outbox.names == set()
    assert files(folder) == [f"{ALERT.file_stem}.json"]


async def test_file_with_mismatched_name_is_read_once(folder: Path) -> None:
    write_leftover(folder, "000000000001-x.json", ALERT.content())
    outbox = AlertOutbox(folder)
    await outbox.open()
    assert await outbox.read("000000000001-x") is None
    assert outbox.names == set()


async def test_alert_files_are_complete_and_private(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    made, _ = process(folder, clock, tasks, AWAY)
    assert await made.raise_alert(scope())
    (name,) = [name for name in files(folder) if name.endswith(".json")]
    kept = folder / name
    assert kept.stat().st_mode & 0o777 == 0o600
    assert Alert.from_content(kept.read_bytes()).threshold_pct == 80


async def test_failed_delivery_is_retried_with_growing_backoff(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    made, receiver = process(folder, clock, tasks, *[WebhookResponse(500)] * 12)
    assert await made.raise_alert(scope())
    await settle()
    pauses = []
    for _ in range(12):
        (pause,) = clock.remaining_sleeps()
        pauses.append(pause)
        await clock.advance(pause)
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert (receiver.attempts, len(receiver.received)) == (13, 1)
    assert (made.deliveries.failed, made.deliveries.delivered, made.deliveries.pending) == (12, 1, 0)
    assert [name for name in files(folder) if name.endswith(".json")] == []


async def test_retry_backoff_is_jittered_by_half(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    made, _ = process(folder, clock, tasks, WebhookResponse(500))
    made.deliveries._chance = lambda: 0.0
    assert await made.raise_alert(scope())
    await settle()
    assert clock.remaining_sleeps() == [0.5]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422, 499])
async def test_rejected_alert_is_abandoned(
    folder: Path, clock: ManualClock, tasks: Tasks, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    made, receiver = process(folder, clock, tasks, WebhookResponse(status))
    assert await made.raise_alert(scope())
    await settle()
    assert (receiver.attempts, receiver.received, clock.remaining_sleeps()) == (1, [], [])
    assert (made.deliveries.abandoned, made.deliveries.pending) == (1, 0)
    assert [name for name in files(folder) if name.endswith(".json")] == []
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"abandoned without notification; webhook alerts.example.com:443: response status {status}" in error


@pytest.mark.parametrize("status", [100, 204, 299, 300, 302, 308, 408, 429, 500, 503, 599])
async def test_other_status_is_accepted_or_retried(folder: Path, clock: ManualClock, tasks: Tasks, status: int) -> None:
    made, receiver = process(folder, clock, tasks, WebhookResponse(status))
    assert await made.raise_alert(scope())
    await settle()
    assert len(receiver.received) == (1 if 200 <= status < 300 else 0)
    await clock.advance(1)
    assert len(receiver.received) == 1
    assert made.deliveries.abandoned == 0


async def test_undelivered_alert_is_abandoned_after_three_days(
    folder: Path, clock: ManualClock, tasks: Tasks, caplog: pytest.LogCaptureFixture
) -> None:
    made, receiver = process(folder, clock, tasks, *[AWAY] * 10_000)
    assert await made.raise_alert(scope())
    await clock.advance(GIVE_UP_SECONDS - 1)
    assert made.deliveries.pending == 1
    clock.set_wall(0)  # nor does it live longer by a clock that goes wrong
    await clock.advance(1 + MAX_RETRY_SECONDS)
    assert (made.deliveries.pending, made.deliveries.abandoned, receiver.received) == (0, 1, [])
    assert clock.remaining_sleeps() == []
    assert made.deliveries.failed == receiver.attempts - 1
    messages = [record.levelname for record in caplog.records if record.name == "price_keeper.alerts"]
    assert (messages[0], {*messages[1:-1]}, messages[-1]) == ("WARNING", {"WARNING"}, "ERROR")


@pytest.mark.parametrize(("days", "tries"), [(0, 2), (2, 2), (3, 1), (5, 1)])
async def test_restart_keeps_three_day_limit_but_allows_one_attempt(
    folder: Path, clock: ManualClock, days: int, tries: int
) -> None:
    rows = ScriptedAlertStore()
    async with Tasks(clock) as tasks:
        made, _ = process(folder, clock, tasks, AWAY, rows=rows)
        assert await made.raise_alert(scope())
        await settle()
    await clock.advance(days * 86_400)
    async with Tasks(clock) as tasks:
        made, receiver = process(folder, clock, tasks, AWAY, AWAY, AWAY, rows=rows)
        await made.outbox.open()
        await made.alerts.settle_unfinished()
        await clock.advance(1)
        assert receiver.attempts == tries
        assert made.alerts.raised == {}  # the process before this one has raised it


async def test_clock_set_back_does_not_prolong_retries(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    rows = ScriptedAlertStore()
    async with Tasks(clock) as before:
        made, _ = process(folder, clock, before, AWAY, rows=rows)
        assert await made.raise_alert(scope())
        await settle()
    clock.set_wall(clock.now() - 30 * 86_400)
    made, _ = process(folder, clock, tasks, *[AWAY] * 10_000, rows=rows)
    await made.outbox.open()
    await made.alerts.settle_unfinished()
    await clock.advance(GIVE_UP_SECONDS + MAX_RETRY_SECONDS)
    assert (made.deliveries.abandoned, made.deliveries.pending) == (1, 0)


async def test_excess_alerts_wait_on_disk_oldest_first(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    made, receiver = process(folder, clock, tasks, *[AWAY] * 2, max_in_flight=2)
    for pct in (10, 20, 30, 40, 50):
        assert await made.raise_alert(scope(), pct)
        await settle()
        clock.set_wall(clock.now() + 1)
    assert (made.deliveries.pending, len(made.deliveries._in_flight), receiver.attempts) == (5, 2, 2)
    await made.alerts.settle_unfinished()
    assert receiver.attempts == 2
    await clock.advance(1)
    assert [each["threshold_pct"] for each in receiver.received] == [10, 20]
    for so_far in ([10, 20, 30, 40], [10, 20, 30, 40, 50]):
        await made.alerts.settle_unfinished()
        await settle()
        assert [each["threshold_pct"] for each in receiver.received] == so_far
    assert made.deliveries.pending == 0


async def test_alerts_in_flight_do_not_take_turns_of_waiting_ones(
    folder: Path, clock: ManualClock, tasks: Tasks
) -> None:
    made, receiver = process(folder, clock, tasks, max_in_flight=2)
    gates = {b"10": asyncio.Event(), b"20": asyncio.Event(), b"30": asyncio.Event()}

    async def send(name: str, body: bytes) -> WebhookResponse:
        await next(gate for pct, gate in gates.items() if b'"threshold_pct":' + pct in body).wait()
        return await ScriptedReceiver.send(receiver, name, body)

    receiver.send = send  # type: ignore[method-assign]
    for pct in (10, 20, 30):
        assert await made.raise_alert(scope(), pct)
        clock.set_wall(clock.now() + 1)
    gates[b"20"].set()
    await settle()
    assert len(made.deliveries._in_flight) == 1  # the oldest; the newest did not fit
    await made.alerts.settle_unfinished()
    assert len(made.deliveries._in_flight) == 2


async def test_concurrent_requests_to_receiver_are_bounded(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    made, receiver = process(folder, clock, tasks)
    gate, most, now = asyncio.Event(), 0, 0

    async def send(name: str, body: bytes) -> WebhookResponse:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await gate.wait()
        now -= 1
        return ACCEPTED

    receiver.send = send  # type: ignore[method-assign]
    for pct in range(1, 20):
        assert await made.raise_alert(scope(), pct)
    await settle()
    gate.set()
    await settle()
    assert most == MAX_CONCURRENT_REQUESTS
    assert made.deliveries.delivered == 19


@pytest.mark.parametrize("fits", [True, False])
async def test_full_disk_does_not_prevent_delivery(
    folder: Path,
    clock: ManualClock,
    tasks: Tasks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fits: bool,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox_module.os, "fsync", full)
    made, receiver = process(folder, clock, tasks, max_in_flight=int(fits))
    assert await made.raise_alert(scope())
    await settle()
    assert len(receiver.received) == int(fits)
    assert (made.deliveries.pending, made.deliveries.abandoned) == (0, int(not fits))
    assert "cannot be written to disk (No space left on device); it is delivered, but lost" in caplog.text
    assert [name for name in files(folder) if name.endswith(".json")] == []


async def test_failed_write_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox_module.os, "fsync", full)
    outbox = AlertOutbox(folder)
    with pytest.raises(OSError, match="No space left"):
        await outbox.persist(ALERT)
    assert (outbox.names, files(folder)) == (set(), [])


async def test_outbox_write_syncs_content_before_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is on the disk before the name, and the name before the alert is sent."""
    done: list[str] = []
    sync, replace_file = os.fsync, os.replace

    def noted_sync(number: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else f"{os.fstat(number).st_size} bytes")
        sync(number)

    def noted_replace(old: str, new: Path) -> None:
        done.append("name")
        replace_file(old, new)

    monkeypatch.setattr(outbox_module.os, "fsync", noted_sync)
    monkeypatch.setattr(outbox_module.os, "replace", noted_replace)
    await AlertOutbox(folder).persist(ALERT)
    assert done == [f"{len(ALERT.content())} bytes", "name", "folder"]


async def test_unreadable_outbox_folder_does_not_prevent_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_leftover(folder / "x.tmp", "x", b"")  # a folder, which no unlink removes
    await AlertOutbox(folder).open()
    assert "cannot be listed" in caplog.text


async def test_several_thresholds_crossed_at_once_are_each_delivered(
    folder: Path, clock: ManualClock, tasks: Tasks
) -> None:
    made, receiver = process(folder, clock, tasks)
    whom = scope()
    assert [await made.raise_alert(whom, pct) for pct in (50, 80, 95, 100)] == [True] * 4
    await settle()
    assert sorted(each["threshold_pct"] for each in receiver.received) == [50, 80, 95, 100]


async def test_alert_is_delivered_only_after_store_returns(
    folder: Path, clock: ManualClock, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ScriptedAlertStore()
    rows.faults = ["after", "before"]
    made, receiver = process(folder, clock, tasks, rows=rows)
    written, write = [], made.outbox._write
    monkeypatch.setattr(made.outbox, "_write", lambda alert: (written.append(alert), write(alert)))
    made.alerts.start(tasks)
    assert not await made.raise_alert(scope())
    await settle()
    assert (receiver.attempts, made.deliveries.pending) == (0, 1)
    for _ in range(3):
        await clock.advance(SETTLE_SECONDS)
        await asyncio.sleep(0.01)  # a thread reads the file
        await settle()
    assert len(receiver.received) == 1
    assert (made.alerts.raised, made.deliveries.pending, len(written)) == ({80: 1}, 0, 1)


async def test_sweep_and_concurrent_raise_deliver_once(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    for order in (0, 1):
        rows, whom = ScriptedAlertStore(), scope()
        rows.faults = ["after"]
        made, receiver = process(folder.with_name(str(order)), clock, tasks, rows=rows)
        assert not await made.raise_alert(whom)
        both = [made.raise_alert(whom), made.alerts.settle_unfinished()]
        await asyncio.gather(*(both if order else both[::-1]))
        await settle()
        assert (len(receiver.received), made.alerts.raised, rows.puts) == (1, {80: 1}, 2)


async def test_sweep_skips_alert_delivered_meanwhile(folder: Path, clock: ManualClock, tasks: Tasks) -> None:
    rows, whom = ScriptedAlertStore(), scope()
    rows.faults = ["before", "before"]
    made, receiver = process(folder, clock, tasks, rows=rows)
    for pct in (50, 80):
        assert not await made.raise_alert(whom, pct)
    held, put = asyncio.Event(), rows.put

    async def slow(each: Any) -> None:
        if each.key.sk == "PCT#050":
            await held.wait()
        await put(each)

    rows.put = slow  # type: ignore[method-assign]
    sweep = asyncio.create_task(made.alerts.settle_unfinished())
    await eventually(lambda: made.alerts._claiming)
    assert await made.raise_alert(whom, 80)
    await eventually(lambda: receiver.received)
    held.set()
    await sweep
    await settle()
    assert [each["threshold_pct"] for each in receiver.received] == [80, 50]
    assert made.alerts.raised == {50: 1, 80: 1}
    assert rows.puts == 4
