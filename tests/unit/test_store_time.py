"""The store's time as its answers tell it, whatever the machine's own clocks say."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.errors import StoreError
from price_keeper.rates.store_time import StoreTime
from price_keeper.rates.token_bucket import SKEW_MS
from price_keeper.stores.contract import Key, Query
from price_keeper.stores.dynamodb import DynamoStore

from tests.support.clock import ManualClock
from tests.support.engines import PREFIX, Engines


def date(seconds: float) -> str:
    return format_datetime(datetime.fromtimestamp(int(seconds), UTC), usegmt=True)


class Answers:
    """A store whose clock is `ahead` of the machine's, and answers that take their time."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.clock = ManualClock()
        self.time = StoreTime(self.clock)
        self.ahead = self.clock.now() - self.clock.monotonic() + ahead

    @property
    def store_now(self) -> float:
        return self.clock.monotonic() + self.ahead

    @property
    def error_ms(self) -> float:
        return abs(self.time.now_ms() - self.store_now * 1000)

    async def answer(self, there: float = 0.0, back: float = 0.0) -> None:
        answered = self.time.start_request()
        await self.clock.advance(there)
        date_header = date(self.store_now)
        await self.clock.advance(back)
        answered(date_header)


async def test_time_before_any_answer_is_of_the_machine() -> None:
    answers = Answers(ahead=500)
    assert answers.time.now_ms() == int(answers.clock.now() * 1000)
    await answers.clock.advance(5)
    answers.clock.set_wall(answers.clock.now() - 3_600)
    assert answers.time.now_ms() == int(answers.clock.now() * 1000)


@given(st.floats(-(10**6), 10**6), st.lists(st.tuples(*[st.floats(0, 2)] * 3), min_size=1, max_size=20))
def test_one_answer_gives_time_within_a_second(ahead: float, answers: list[tuple[float, float, float]]) -> None:
    asyncio.run(_narrows(ahead, answers))


async def _narrows(ahead: float, answers: list[tuple[float, float, float]]) -> None:
    rig, best = Answers(ahead), 10.0
    for pause, there, back in answers:
        await rig.clock.advance(pause)
        await rig.answer(there, back)
        best = min(best, (1 + there + back) / 2 + 0.05) + 0.001
        assert rig.error_ms <= max(SKEW_MS, best * 1000)
        assert rig.time._offset is not None
        assert rig.time._offset.low <= rig.ahead <= rig.time._offset.high
        assert rig.time._offset.high - rig.time._offset.low <= 2 * best


async def test_many_answers_give_time_within_their_tolerance() -> None:
    answers = Answers(ahead=12.3)
    for _ in range(40):
        await answers.answer(0.003, 0.003)
        await answers.clock.advance(0.27)
    assert answers.error_ms < 60


async def test_wall_clock_jump_does_not_change_store_time() -> None:
    answers = Answers()
    await answers.answer()
    answers.clock.set_wall(0)
    assert answers.error_ms < 600


@pytest.mark.parametrize("step", [3_600.0, -3_600.0, 5.0, -5.0])
async def test_next_answer_after_clock_change_is_correct(step: float) -> None:
    """Also when the machine was asleep, which its monotonic clock does not count."""
    answers = Answers()
    for _ in range(10):
        await answers.clock.advance(0.7)
        await answers.answer(0.01, 0.01)
    answers.ahead += step
    await answers.answer(0.01, 0.01)
    assert answers.error_ms < 600


async def test_store_time_goes_back_only_for_large_corrections() -> None:
    answers = Answers()
    before = answers.time.now_ms()
    answers.ahead -= 1.4
    await answers.answer()
    assert answers.time.now_ms() == before
    await answers.clock.advance(2)
    assert before < answers.time.now_ms() < before + 2_000
    answers.ahead -= 10
    await answers.answer()
    assert answers.time.now_ms() < before - 5_000


async def test_uncertainty_grows_with_clock_drift() -> None:
    answers = Answers()
    for _ in range(40):
        await answers.answer()
        await answers.clock.advance(0.27)
    await answers.clock.advance(1_000)
    answers.ahead += 0.09
    await answers.answer()
    lead = answers.time._offset
    assert lead is not None
    assert lead.low <= answers.ahead <= lead.high
    assert lead.high - lead.low < 0.4


@pytest.mark.parametrize(
    "date_header", ["", "yesterday", "Wed, 99 Nov 2026 12:00:00 GMT", "Wed, 18 Nov 99999 12:00:00 GMT"]
)
def test_malformed_date_is_ignored(date_header: str) -> None:
    answers = Answers()
    answers.time.start_request()(date_header)
    assert answers.time._offset is None


def test_date_is_parsed_as_gmt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        answers = Answers()
        for date_header in ("Wed, 18 Nov 2026 12:00:00 GMT", "Wed, 18 Nov 2026 12:00:00 -0000"):
            answers.time.start_request()(date_header)
            assert answers.error_ms < 600
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("engine", ["moto", "ministack"])
async def test_dynamodb_answers_and_errors_give_time(engine: str, engines: Engines) -> None:
    clock, heard = ManualClock(), []

    def asking() -> object:
        return heard.append

    store = DynamoStore(
        region="us-east-1",
        table_prefix=PREFIX,
        endpoint=engines.endpoints[engine],
        sleep=clock.sleep,
        on_request=asking,
    )
    await store.open()
    try:
        async with engines.open(engine, Path()):
            await store.get(Key("config", "NOBODY", "CONFIG"))
        assert len(heard) == 1
        store._prefix = "no-such-table-"
        with pytest.raises(StoreError):
            await store.query(Query("config", "NOBODY"))
    finally:
        await store.close()
    assert len(heard) == 2
    for date_header in heard:
        times = StoreTime(ManualClock(wall=0.0))
        times.start_request()(date_header)
        assert abs(times.now_ms() / 1000 - datetime.now(UTC).timestamp()) < 60
