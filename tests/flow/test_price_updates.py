"""Prices through a day and a night: a real client, a server that speaks the Price List's protocol, a real store."""

from __future__ import annotations

import asyncio
import logging

import pytest
from price_keeper.usage import price_list_client, price_updates
from price_keeper.usage.price_updates import PriceStatus

from tests.support import price_list_server as aws
from tests.support.price_fleet import (
    CLAUDE_PRICES,
    DAY,
    HAIKU,
    LABELS,
    NOON,
    NOVA,
    PriceFleet,
    find_standard,
    status,
    usd_per_1m,
)
from tests.support.price_list_server import BEDROCK, MODELS, list_claude
from tests.support.raw_clients import eventually

BOTH_LISTS = [(BEDROCK, "us-east-1"), (MODELS, "us-east-1")]


@pytest.fixture
def _fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits of the real client's own retries."""
    monkeypatch.setattr(price_list_client, "MAX_ATTEMPTS", 1)


# ---------------------------------------------------------------- the day's prices


async def test_configured_prices_apply_until_list_is_read(fleet: PriceFleet) -> None:
    tariffs = fleet.sidecar()
    assert usd_per_1m(find_standard(tariffs)) == 1
    assert status(tariffs).source == "config"
    assert status(tariffs).age_seconds is None


async def test_listed_prices_win_over_configured(fleet: PriceFleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tariffs = await fleet.start_sidecar()
    await fleet.clock.advance(60)
    assert usd_per_1m(find_standard(tariffs)) == 1.1
    assert status(tariffs) == PriceStatus("standard", "us-east-1", HAIKU, "aws", "2026-11-18", 60.0, "")
    assert status(tariffs, "economy").source == "aws"
    assert tariffs.for_label("economy", "us-east-1", NOVA).tiers["flex"].input == 30_000
    assert fleet.server.reads == BOTH_LISTS
    assert len(fleet.server.calls) > 4  # the lists have several pages
    assert tariffs.failures == 0
    assert caplog.text == ""


async def test_missing_listed_price_comes_from_configuration(fleet: PriceFleet) -> None:
    fleet.server.products = list_claude("Claude Haiku 4.5", "1.1 5.5 0.11 1.375 2.2")[:2]
    tariff = find_standard(await fleet.start_sidecar())
    assert (tariff.source, tariff.version[:18]) == ("aws+config", "2026-11-18+config-")
    assert tariff.tiers["default"].cache_read == 100_000


async def test_cache_row_has_expected_form(fleet: PriceFleet) -> None:
    await fleet.start_sidecar()
    unit = "_price_usd_micros_per_1m"
    assert await fleet.row(NOVA, "2026-11-18") == {
        "tiers": {
            "default": {
                f"input{unit}": 60_000,
                f"output{unit}": 240_000,
                f"cache_read{unit}": 15_000,
                f"cache_write_5m{unit}": 0,
            },
            "flex": {f"input{unit}": 30_000, f"output{unit}": 120_000, f"cache_read{unit}": 7500},
        },
        "latencies": {},
        "model_label": "economy",
        "tier": "default",
        "family": "nova",
        "description": f"{NOVA} in us-east-1, on demand, from the AWS Price List",
        f"input{unit}": 60_000,
        f"output{unit}": 240_000,
        "fetched_at_epoch": int(NOON),
        "expires_at_epoch": int(NOON + 3 * DAY),
    }


async def test_cached_row_of_unclear_prices_names_its_label_and_has_no_price(fleet: PriceFleet) -> None:
    fleet.server.products = [each for each in fleet.server.products if "Nova" not in str(each)]
    await fleet.start_sidecar()
    row = await fleet.row(NOVA, "2026-11-18")
    assert row is not None
    assert (row["model_label"], row["family"]) == ("economy", "nova")
    assert "unclear" in row
    assert not any("price" in name for name in row)


async def test_negotiated_prices_are_kept(fleet: PriceFleet) -> None:
    tariffs = await fleet.start_sidecar(LABELS.replace("prices_usd", "price_source: config, prices_usd"))
    assert usd_per_1m(find_standard(tariffs)) == 1
    assert status(tariffs) == PriceStatus(
        "standard", "us-east-1", HAIKU, "config", find_standard(tariffs).version, None, ""
    )
    assert fleet.server.calls == []


async def test_each_endpoint_has_prices_of_its_region_and_model(fleet: PriceFleet) -> None:
    fleet.server.products += list_claude("Claude Haiku 4.5", "1.3 6.5 0.13 1.625 2.6", region="eu-west-1")
    places = f"[{{region: us-east-1}}, {{region: eu-west-1, model: eu.{HAIKU}}}, {{region: us-west-2}}]"
    tariffs = await fleet.start_sidecar(
        f'labels: {{standard: {{model: "{HAIKU}", format: anthropic, endpoints: {places}, '
        f"prices_usd_per_1m: {CLAUDE_PRICES}}}}}"
    )
    assert usd_per_1m(find_standard(tariffs)) == 1.1
    assert usd_per_1m(tariffs.for_label("standard", "eu-west-1", f"eu.{HAIKU}")) == 1.3
    assert usd_per_1m(tariffs.for_label("standard", "us-west-2", HAIKU)) == 1
    assert [each.trouble for each in tariffs.status()] == ["", "", "the AWS Price List has nothing for us-west-2"]


async def test_unlabelled_models_have_default_price(fleet: PriceFleet) -> None:
    price = "default_price: {input: 7, output: 7, cache_read: 7, cache_write_5m: 7, cache_write_1h: 7}"
    tariffs = await fleet.start_sidecar(LABELS + price)
    assert usd_per_1m(tariffs.for_label("", "eu-west-1", "any.model")) == 7
    with pytest.raises(LookupError):
        (await fleet.start_sidecar()).for_label("", "eu-west-1", "any.model")


@pytest.mark.parametrize(
    "asked", [("other", "us-east-1", HAIKU), ("standard", "eu-west-1", HAIKU), ("standard", "us-east-1", NOVA)]
)
async def test_unconfigured_label_has_no_price(fleet: PriceFleet, asked: tuple[str, str, str]) -> None:
    with pytest.raises(LookupError):
        fleet.sidecar().for_label(*asked)


# ---------------------------------------------------------------- days and nights


async def test_new_price_does_not_apply_to_calls_in_flight(fleet: PriceFleet) -> None:
    tariffs = await fleet.start_sidecar()
    begun = find_standard(tariffs)
    fleet.raise_prices()
    await fleet.clock.advance(DAY)
    await tariffs.refresh()
    assert (usd_per_1m(find_standard(tariffs)), find_standard(tariffs).version) == (2.2, "2026-11-19")
    assert (usd_per_1m(begun), begun.version) == (1.1, "2026-11-18")
    assert find_standard(await fleet.start_sidecar()) == find_standard(tariffs)  # of two entries, the newer one


async def test_prices_are_read_once_a_day(fleet: PriceFleet) -> None:
    tariffs = await fleet.start_sidecar()
    calls = len(fleet.server.calls)
    fleet.raise_prices()
    await fleet.clock.advance(DAY / 2 - 1)
    await tariffs.refresh()
    assert usd_per_1m(find_standard(tariffs)) == 1.1
    assert len(fleet.server.calls) == calls


@pytest.mark.usefixtures("_fails_at_once")
async def test_just_after_midnight_former_prices_apply(fleet: PriceFleet) -> None:
    await fleet.start_sidecar()
    await fleet.clock.advance(DAY / 2 + 5)  # five seconds into the 19th, UTC
    fleet.server.always = aws.BROKEN
    tariffs = await fleet.start_sidecar()
    assert (usd_per_1m(find_standard(tariffs)), find_standard(tariffs).version) == (1.1, "2026-11-18")
    assert status(tariffs).trouble == "the AWS Price List answers InternalErrorException"
    assert status(tariffs).age_seconds == DAY / 2 + 5


async def test_day_not_begun_has_no_prices(fleet: PriceFleet) -> None:
    """As when some sidecar's clock is ahead."""
    fleet.clock.set_wall(NOON + DAY)
    fleet.raise_prices()
    await fleet.start_sidecar()
    fleet.clock.set_wall(NOON)
    fleet.server.products = aws.US_EAST
    tariffs = await fleet.start_sidecar()
    assert (usd_per_1m(find_standard(tariffs)), find_standard(tariffs).version) == (1.1, "2026-11-18")


async def test_corrected_clock_uses_right_day(fleet: PriceFleet) -> None:
    tariffs = await fleet.start_sidecar()
    fleet.clock.set_wall(NOON + DAY)
    fleet.raise_prices()
    await tariffs.refresh()
    fleet.clock.set_wall(NOON)
    await tariffs.refresh()
    assert find_standard(tariffs).version == "2026-11-18"


@pytest.mark.usefixtures("_fails_at_once")
async def test_expired_cache_entry_is_ignored_but_prices_in_force_stay(fleet: PriceFleet) -> None:
    running = await fleet.start_sidecar()
    await fleet.clock.advance(3 * DAY)
    fleet.server.always = aws.BROKEN
    await running.refresh()
    assert (usd_per_1m(find_standard(running)), find_standard(running).version) == (1.1, "2026-11-18")
    assert status(running).age_seconds == 3 * DAY
    new = await fleet.start_sidecar()
    assert (usd_per_1m(find_standard(new)), find_standard(new).source) == (1, "config")


# ---------------------------------------------------------------- a fleet


async def test_second_sidecar_uses_cached_list(fleet: PriceFleet) -> None:
    first, second = await fleet.start_sidecar(), await fleet.start_sidecar()
    assert find_standard(first) == find_standard(second)
    assert fleet.server.reads == BOTH_LISTS


async def test_concurrent_starts_read_list_once(fleet: PriceFleet) -> None:
    fleet.server.add_faults(aws.Fault(200, b"{}", seconds=0.0))  # even if its first try fails
    many = [fleet.sidecar() for _ in range(5)]
    await asyncio.gather(*(each.refresh() for each in many))
    assert fleet.server.reads == BOTH_LISTS[:1]
    assert sorted(status(each).trouble for each in many) == sorted(
        ["an answer that is not the AWS Price List's"] + 4 * ["another process is reading the price list"]
    )
    await fleet.clock.advance(price_updates.REFRESH_SECONDS)
    await asyncio.gather(*(each.refresh() for each in many))
    await asyncio.gather(*(each.refresh() for each in many))
    assert {usd_per_1m(find_standard(each)) for each in many} == {1.1}
    assert fleet.server.reads == BOTH_LISTS[:1] + BOTH_LISTS
    assert {status(each).trouble for each in many} == {""}


async def test_all_sidecars_have_same_prices_within_a_day(fleet: PriceFleet) -> None:
    """Even if one took so long to read them that another one read them, too."""
    fleet.server.gate = asyncio.Event()
    slow, quick = fleet.sidecar(), fleet.sidecar()
    reading = asyncio.create_task(slow.refresh())
    await eventually(lambda: fleet.server.calls)
    await fleet.clock.advance(price_updates.CLAIM_TTL_SECONDS)
    gate, fleet.server.gate = fleet.server.gate, None
    await quick.refresh()
    fleet.raise_prices()
    gate.set()
    await reading
    assert usd_per_1m(find_standard(slow)) == usd_per_1m(find_standard(quick)) == 1.1


async def test_cached_prices_are_used_without_reading_list(fleet: PriceFleet) -> None:
    alone = await fleet.start_sidecar(reads=False)
    assert (find_standard(alone).source, status(alone).trouble, alone.failures) == ("config", "", 0)
    await fleet.start_sidecar()
    await alone.refresh()
    assert find_standard(alone).source == "aws"


async def test_missing_model_is_searched_once_a_day(fleet: PriceFleet, caplog: pytest.LogCaptureFixture) -> None:
    text = 'labels: {standard: {model: "meta.llama9-v1:0", format: llama, prices_usd_per_1m: {input: 1, output: 2}}}'
    for tariffs in (await fleet.start_sidecar(text), await fleet.start_sidecar(text)):
        assert tariffs.status()[0].trouble == "no product is certainly this model's"
        assert tariffs.status()[0].source == "config"
    assert fleet.server.reads == BOTH_LISTS
    assert "prices of label standard in us-east-1 stay those of config-" in caplog.text


async def test_removed_model_keeps_newest_prices(fleet: PriceFleet) -> None:
    tariffs = await fleet.start_sidecar()
    fleet.server.products = list(aws.NOVA_LITE)
    await fleet.clock.advance(DAY)
    await tariffs.refresh()
    for each in (tariffs, await fleet.start_sidecar()):
        assert (usd_per_1m(find_standard(each)), find_standard(each).version) == (1.1, "2026-11-18")
        assert status(each).trouble == "no product is certainly this model's"
        assert status(each, "economy").version == "2026-11-19"


async def test_custom_profile_is_never_searched(fleet: PriceFleet) -> None:
    arn = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/a1"
    text = f'labels: {{standard: {{model: "{arn}", format: llama, prices_usd_per_1m: {{input: 1, output: 2}}}}}}'
    tariffs = await fleet.start_sidecar(text)
    assert status(tariffs).trouble == "the id does not say which model of the price list it is"
    assert fleet.server.calls == []
    assert status(await fleet.start_sidecar(text, reads=False)).trouble == ""
