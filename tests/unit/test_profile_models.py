"""Lookups of inference profiles: how many run at one time, who may start them, and how long a failure is kept."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import orjson
import pytest
from price_keeper.domain import Caller
from price_keeper.errors import UpstreamUnavailable
from price_keeper.upstream import profile_models
from price_keeper.upstream.forwarder import Authorizer
from price_keeper.upstream.profile_models import ProfileModels

from tests.support.clock import ManualClock

REGION = "us-east-1"
SHOP, WEB = Caller("acme", "shop", "one"), Caller("acme", "web", "two")
ANSWER = orjson.dumps({"models": [{"modelArn": f"arn:aws:bedrock:{REGION}::foundation-model/a.m"}]})


def arn(name: object) -> str:
    return f"arn:aws:bedrock:{REGION}:123456789012:application-inference-profile/{name}"


class Lookups(ProfileModels):
    """Every lookup waits until the test lets it end."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__([REGION], lambda region: region, cast(Authorizer, None), clock)
        self.asked: list[str] = []
        self.may_end = asyncio.Event()
        self.failure: Exception | None = None

    async def _ask(self, arn: str, region: str) -> tuple[int, bytes]:
        self.asked.append(arn)
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return 200, ANSWER

    def start(self, name: object, caller: Caller) -> asyncio.Task[Any]:
        return asyncio.create_task(self.find(arn(name), REGION, caller))


async def test_caller_with_many_profiles_keeps_nobody_else_from_lookups() -> None:
    lookups = Lookups(ManualClock())
    of_shop = [lookups.start(number, SHOP) for number in range(9)]
    await asyncio.sleep(0)
    honest = lookups.start("honest", WEB)
    joined = lookups.start(0, WEB)  # the lookup of another one is free
    await asyncio.sleep(0)
    lookups.may_end.set()
    outcomes = await asyncio.gather(*of_shop, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [str] * 2 + [UpstreamUnavailable] * 7
    assert (await honest, await joined) == ("a.m", "a.m")
    assert lookups.asked == [arn(0), arn(1), arn("honest")]
    assert await lookups.find(arn(5), REGION, SHOP) == "a.m"  # those that ended count no more


async def test_callers_together_have_bounded_lookups() -> None:
    lookups = Lookups(ManualClock())
    tasks = [lookups.start(number, Caller("acme", f"app-{number // 2}", "one")) for number in range(10)]
    await asyncio.sleep(0)
    lookups.may_end.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(outcome == "a.m" for outcome in outcomes) == profile_models.MAX_LOOKUPS


@pytest.mark.parametrize(
    ("failure", "seconds"),
    [
        (TimeoutError(), profile_models.TIMEOUT_FAILURE_SECONDS),
        (ConnectionResetError(), profile_models.FAILURE_SECONDS),
    ],
)
async def test_failed_lookup_is_repeated_after_its_time(failure: Exception, seconds: float) -> None:
    clock = ManualClock()
    lookups = Lookups(clock)
    lookups.failure = failure
    lookups.may_end.set()
    for passed in (0.0, seconds - 1):
        await clock.advance(passed)
        with pytest.raises(UpstreamUnavailable) as refused:
            await lookups.find(arn("a"), REGION, SHOP)
        assert refused.value.retry_after == seconds
        assert len(lookups.asked) == 1
    lookups.failure = None
    await clock.advance(2)
    assert await lookups.find(arn("a"), REGION, SHOP) == "a.m"


async def test_profile_of_other_region_is_not_looked_up() -> None:
    lookups = Lookups(ManualClock())
    assert await lookups.find(arn("a"), "eu-west-1", SHOP) is None
    assert lookups.asked == []
