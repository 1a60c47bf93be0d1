"""A trouble that lasts is logged once when it starts, at most once a minute while it lasts, and once when it ends."""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from price_keeper.errors import RecordingUnavailable, StoreError, StoreReadOnly, StoreThrottled, StoreUnavailable
from price_keeper.stores.sqlite_file import translate_sqlite_error
from price_keeper.telemetry.incident import REPEAT_SECONDS, Incident
from price_keeper.telemetry.logs import log_read_failure, store_reads
from price_keeper.upstream.aws_credentials import RefreshingCredentials

from tests.support.clock import ManualClock
from tests.support.recording_harness import RecordingHarness

TEN_MINUTES = 600
MOST_LINES = TEN_MINUTES // REPEAT_SECONDS
CREDENTIALS = SimpleNamespace(access_key="KEY", secret_key="secret", token=None)


@pytest.fixture
def incident() -> tuple[Incident, ManualClock]:
    clock = ManualClock()
    return Incident(logging.getLogger("price_keeper.tests"), clock.monotonic), clock


async def test_incident_of_ten_minutes_is_logged_at_start_once_a_minute_and_at_end(
    incident: tuple[Incident, ManualClock], caplog: pytest.LogCaptureFixture
) -> None:
    trouble, clock = incident
    trouble.end("it works again")  # which is no news
    for _ in range(TEN_MINUTES):
        trouble.report("it is broken: %s", "no reason")
        await clock.advance(1)
    for _ in range(5):
        trouble.end("it works again")
    messages = [each.getMessage() for each in caplog.records]
    assert messages == ["it is broken: no reason"] * int(MOST_LINES) + ["it works again, after 600 s"]


async def test_incident_that_comes_and_goes_is_logged_twice_a_minute(
    incident: tuple[Incident, ManualClock], caplog: pytest.LogCaptureFixture
) -> None:
    trouble, clock = incident
    for _ in range(TEN_MINUTES):
        trouble.report("it is broken")
        trouble.end("it works again")
        await clock.advance(1)
    assert len(caplog.records) == 2 * MOST_LINES


def test_incident_is_logged_after_clock_was_set_back(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([10_000.0, 100.0, 100.0, 130.0])
    trouble = Incident(logging.getLogger("price_keeper.tests"), lambda: next(times), logging.ERROR)
    for _ in range(2):
        trouble.report("it is broken")
    assert [each.levelname for each in caplog.records] == ["ERROR"] * 2


def _check_lines(caplog: pytest.LogCaptureFixture, trouble: str, end: str) -> None:
    messages = [each.getMessage() for each in caplog.records]
    assert trouble in messages[0]
    assert messages[-1].startswith(end)
    assert all(trouble in each for each in messages[:-1])
    assert 2 <= len(messages) <= 1 + MOST_LINES + 1


@pytest.mark.parametrize("exact_store", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "failure",
    [StoreUnavailable("no answer"), StoreThrottled("slow down"), StoreReadOnly("the file is read-only")],
    ids=lambda failure: type(failure).__name__,
)
async def test_store_trouble_of_ten_minutes_is_one_incident(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: StoreError
) -> None:
    async def fail(*_: object) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(rec.flusher.sender, "send", fail)
        for _ in range(TEN_MINUTES // 5):
            rec.spend(1)
            assert not await rec.flusher.flush()
            await rec.clock.advance(5)
    assert await rec.flusher.flush()
    _check_lines(caplog, f"spend cannot be flushed, and waits in the journal: {failure}; ", "spend is flushed again")
    assert " away" not in caplog.text


@pytest.mark.parametrize("exact_store", ["sqlite"], indirect=True)
async def test_full_journal_of_ten_minutes_is_one_incident(
    rec: RecordingHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    number = rec.begin()
    with monkeypatch.context() as patch:
        patch.setattr(rec.journal._segment, "append", refuse)
        rec.journal.record(number, None)
        for _ in range(TEN_MINUTES // 5):
            with pytest.raises(RecordingUnavailable):
                rec.begin()
            rec.journal.retry_unwritten()
            await rec.clock.advance(5)
    rec.journal.retry_unwritten()
    _check_lines(
        caplog, "cannot be written: No space left on device; ", f"the journal in {rec.folder} can be written again"
    )


def test_store_that_answers_no_read_is_one_incident_whatever_is_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "price_keeper.selection")
    log = logging.getLogger("price_keeper.selection")
    for number in range(100):
        log_read_failure(log, f"the budget of app {number}", "the last one applies", StoreUnavailable("no answer"))
    store_reads.end("settings and budgets are read from the store again")
    levels = [each.levelname for each in caplog.records]
    assert levels == ["WARNING", *["INFO"] * 99, "WARNING"]


async def test_failing_credentials_are_one_incident(caplog: pytest.LogCaptureFixture) -> None:
    found: list[object] = [CREDENTIALS, *[OSError("no answer")] * 60, CREDENTIALS]

    def find() -> object:
        finding = found.pop(0)
        if isinstance(finding, Exception):
            raise finding
        return finding

    credentials = RefreshingCredentials(lambda: find)
    while found:
        await credentials.renew()
    _check_lines(caplog, "AWS credentials could not be renewed: OSError", "AWS credentials are renewed again")


def test_read_only_file_is_no_store_that_is_away(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    with sqlite3.connect(file) as made:
        made.execute("CREATE TABLE t (x)")
    made.close()
    opened = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as refused:
        opened.execute("INSERT INTO t VALUES (1)")
    opened.close()
    failure = translate_sqlite_error(refused.value, file)
    assert type(failure) is StoreReadOnly
    assert f"{file} is read-only (" in str(failure)
