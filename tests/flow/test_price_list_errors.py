"""An unreadable or implausible price list, and a store that is away: the newest prices stay, and that is reported."""

from __future__ import annotations

from typing import Any

import pytest
from price_keeper.errors import StoreUnavailable
from price_keeper.stores import schema
from price_keeper.stores.contract import Page, Put, Query, Store
from price_keeper.usage import price_list_client, price_updates
from price_keeper.usage.price_list_client import AwsPriceList
from price_keeper.usage.price_updates import PriceTables

from tests.support import price_list_server as aws
from tests.support.price_fleet import (
    DAY,
    HAIKU,
    LABELS,
    NOON,
    NOVA,
    PriceFleet,
    configured,
    find_standard,
    status,
    usd_per_1m,
)
from tests.support.price_list_server import list_claude


@pytest.fixture
def _fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits of the real client's own retries."""
    monkeypatch.setattr(price_list_client, "MAX_ATTEMPTS", 1)


@pytest.mark.usefixtures("_fails_at_once")
@pytest.mark.parametrize(
    ("fault", "trouble"),
    [
        (aws.THROTTLED, "the AWS Price List answers ThrottlingException"),
        (aws.DENIED, "the AWS Price List answers AccessDeniedException"),
        (aws.BROKEN, "the AWS Price List answers InternalErrorException"),
        (aws.error("ExpiredNextTokenException"), "the AWS Price List answers ExpiredNextTokenException"),
        (aws.Fault(503, b"<html>"), "the AWS Price List answers 503"),
        (aws.Fault(200, b""), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b"{}"), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b"<html>a captive portal</html>"), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b'{"FormatVersion": "aws_v2", "PriceList": []}'), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b'{"FormatVersion": "aws_v1"}'), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b'{"FormatVersion": "aws_v1", "PriceList": 5}'), "an answer that is not the AWS Price List's"),
        (aws.Fault(200, b"{}", seconds=9), "no answer from the AWS Price List: TimeoutError"),
    ],
)
async def test_unreadable_price_list_changes_nothing(
    fleet: PriceFleet, fault: aws.Fault, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tariffs = await fleet.start_sidecar()
    fleet.raise_prices()
    await fleet.clock.advance(DAY)
    fleet.server.always = fault
    if fault.seconds:
        monkeypatch.setattr(price_list_client, "LIST_TIMEOUT_SECONDS", 0.2)
    await tariffs.refresh()
    await tariffs.refresh()
    assert (usd_per_1m(find_standard(tariffs)), find_standard(tariffs).version) == (1.1, "2026-11-18")
    assert tariffs.failures >= 1
    assert f"prices of label standard in us-east-1 stay those of 2026-11-18: {trouble}" in caplog.text
    fleet.server.always = None
    await fleet.clock.advance(price_updates.REFRESH_SECONDS)
    await tariffs.refresh()
    assert (usd_per_1m(find_standard(tariffs)), status(tariffs).trouble) == (2.2, "")
    for event in ("stay those of", "follow the price list again"):
        assert caplog.text.count(f" {event} ") + caplog.text.count(f" {event}\n") == 2  # once for each label


@pytest.mark.usefixtures("_fails_at_once")
async def test_partly_read_list_is_not_used(fleet: PriceFleet) -> None:
    tariffs = fleet.sidecar()
    original = fleet.server._page

    def breaking(asked: Any) -> Any:
        if len(fleet.server.calls) == 4:
            fleet.server.add_faults(aws.BROKEN)
        return original(asked)

    fleet.server._page = breaking  # type: ignore[method-assign]
    await tariffs.refresh()
    assert {each.source for each in tariffs.status()} == {"config"}
    assert await fleet.row(NOVA, "2026-11-18") is None


async def test_throttled_page_is_retried(fleet: PriceFleet) -> None:
    fleet.server.add_faults(aws.THROTTLED)
    assert usd_per_1m(find_standard(await fleet.start_sidecar())) == 1.1


async def test_endless_pages_are_reported(fleet: PriceFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_list_client, "MAX_PAGES", 3)
    fleet.server.always = aws.Fault(200, b'{"FormatVersion": "aws_v1", "PriceList": [], "NextToken": "again"}')
    assert (
        status(await fleet.start_sidecar()).trouble == "the AWS Price List of AmazonBedrock in us-east-1 does not end"
    )


@pytest.mark.usefixtures("_fails_at_once")
async def test_unreachable_price_list_is_reported(fleet: PriceFleet) -> None:
    price_list = AwsPriceList("http://127.0.0.1:9")
    tariffs = PriceTables(configured(LABELS), fleet.store, price_list, fleet.clock)
    await tariffs.refresh()
    assert status(tariffs).trouble.startswith("no answer from the AWS Price List: ")


async def test_price_off_by_factor_ten_is_rejected(fleet: PriceFleet, caplog: pytest.LogCaptureFixture) -> None:
    """A unit misread by a thousand must not become money."""
    tariffs = await fleet.start_sidecar()
    fleet.server.products = [*list_claude("Claude Haiku 4.5", "1.1 5.5 0.11 1375 2.2"), *aws.NOVA_LITE]
    await fleet.clock.advance(DAY)
    await tariffs.refresh()
    assert (usd_per_1m(find_standard(tariffs)), find_standard(tariffs).version) == (1.1, "2026-11-18")
    caveat = "cache_write_5m at 1375, beside 1.25 in the configuration"
    assert status(tariffs).trouble.endswith(caveat)
    assert caveat in caplog.text
    assert status(tariffs, "economy").version == "2026-11-19"


async def test_trouble_is_logged_once_and_again_when_it_changes(
    fleet: PriceFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.server.always = aws.DENIED
    tariffs = await fleet.start_sidecar()
    for _ in range(3):
        await fleet.clock.advance(price_updates.REFRESH_SECONDS)
        await tariffs.refresh()
    assert len([each for each in caplog.records if "standard" in each.getMessage()]) == 1
    assert tariffs.failures == 4
    fleet.server.always = aws.Fault(200, b"{}")
    await fleet.clock.advance(price_updates.REFRESH_SECONDS)
    await tariffs.refresh()
    assert len([each for each in caplog.records if "standard" in each.getMessage()]) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"tiers": {"default": {"input_price_usd_micros_per_1m": -1}}, "latencies": {}, "fetched_at_epoch": 1},
        {"tiers": {"default": {"input": 1}}, "latencies": {}, "fetched_at_epoch": 1},
        {"tiers": {"default": {"input_price_usd_micros_per_1m": True}}, "latencies": {}, "fetched_at_epoch": 1},
        {"tiers": 5, "latencies": {}, "fetched_at_epoch": 1},
        {"tiers": {}, "latencies": {}},
        {"fetched_at_epoch": 1},
    ],
)
async def test_malformed_cache_entry_is_ignored(fleet: PriceFleet, row: dict[str, Any]) -> None:
    key = schema.price_key(HAIKU, "us-east-1", "2026-11-18")
    await fleet.store.put(Put(key, row | {"expires_at_epoch": int(NOON + DAY)}))
    tariffs = await fleet.start_sidecar()
    assert find_standard(tariffs).source == "config"
    assert status(tariffs).trouble == "the cached entry of the day is malformed"
    assert status(tariffs, "economy").source == "aws"


class Away:
    """A store whose reads, or writes, fail."""

    def __init__(self, store: Store, *verbs: str) -> None:
        self._store, self.verbs = store, verbs

    async def query(self, query: Query) -> Page:
        self._check("query")
        return await self._store.query(query)

    async def put(self, put: Put) -> None:
        self._check("put", put.key.pk)
        await self._store.put(put)

    def _check(self, *verbs: str) -> None:
        if not set(verbs).isdisjoint(self.verbs):
            raise StoreUnavailable("the store is away")


async def test_store_outage_keeps_known_prices(fleet: PriceFleet) -> None:
    store = Away(fleet.store)
    tariffs = await fleet.start_sidecar(store=store)
    await fleet.clock.advance(DAY)
    store.verbs = ("query",)
    await tariffs.refresh()
    assert (usd_per_1m(find_standard(tariffs)), status(tariffs).trouble) == (1.1, "the store is away")
    store.verbs = ()
    await tariffs.refresh()
    assert (find_standard(tariffs).version, status(tariffs).trouble) == ("2026-11-19", "")


async def test_prices_that_cannot_be_cached_are_used_by_reader(fleet: PriceFleet) -> None:
    store = Away(fleet.store, f"{HAIKU}@us-east-1")
    tariffs = await fleet.start_sidecar(store=store)
    assert usd_per_1m(find_standard(tariffs)) == 1.1
    assert tariffs.failures == 1


async def test_prices_settled_for_day_need_no_store(fleet: PriceFleet) -> None:
    store = Away(fleet.store)
    tariffs = await fleet.start_sidecar(store=store)
    store.verbs = ("query", "put")
    await tariffs.refresh()
    assert (tariffs.failures, status(tariffs).trouble) == (0, "")


async def test_trouble_without_list_ends_when_store_returns(fleet: PriceFleet) -> None:
    store = Away(fleet.store, "query")
    tariffs = await fleet.start_sidecar(store=store, reads=False)
    assert status(tariffs).trouble == "the store is away"
    store.verbs = ()
    await tariffs.refresh()
    assert status(tariffs).trouble == ""
