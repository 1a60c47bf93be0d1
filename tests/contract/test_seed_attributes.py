"""Every row of a DynamoDB engine after a play of all flows, attribute by attribute beside the source schema's tables.

The tables are transcribed here as data. `EXCEPTIONS` names each difference with its reason; a new difference fails the
test, and so does an exception that no longer applies.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from price_keeper.budgets.active_label import build_move, set_override
from price_keeper.budgets.effective_settings import resolve_settings
from price_keeper.config.config_sections import DefaultsConfig, parse_config
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.stores.dynamodb_tables import create_missing_tables
from price_keeper.usage.price_list import Product, identify_model
from price_keeper.usage.price_updates import PriceTables

from tests.support.clock import ManualClock
from tests.support.control_harness import ControlHarness, open_control_harness
from tests.support.engines import Engines

ORG, APP = "550e8400-e29b-41d4-a716-446655440000", "app-production-api"
MODEL = "anthropic.claude-haiku-4-5-20251001-v1:0"
S, N, L, M, BOOL, SS = "S", "N", "L", "M", "BOOL", "SS"


@dataclass(frozen=True)
class SeedTable:
    """A table of the schema: its keys as patterns, and the type of each attribute. `sk` is None without a sort key."""

    pk: str
    sk: str | None
    attributes: Mapping[str, str]
    optional: Mapping[str, str]


_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_SCOPE = f"ORG#{_UUID}(?:#APP#[^#]+)?"
_DAY = "DAY#[0-9]{8}"
_SETTINGS = {
    "model_ordering": L,
    "quotas": M,
    "tight_mode_threshold_pct": N,
    "refresh_interval_normal_secs": N,
    "refresh_interval_tight_secs": N,
}
_CREDENTIALS = {"client_id": S, "client_secret_hash": S, "client_secret_created_at_epoch": N}
_STAMPS = {"created_at_epoch": N, "updated_at_epoch": N}
_GRACE = {"client_secret_rotation_grace_expires_at_epoch": N}
_COUNTERS = {"cost_usd_micros": N, "input_tokens": N, "output_tokens": N, "requests": N, "updated_at_epoch": N}

SEED: Mapping[str, tuple[str, SeedTable]] = {
    "org config": (
        "config",
        SeedTable(
            f"ORG#{_UUID}",
            "",
            {
                "org_name": S,
                "timezone": S,
                "quota_scope": S,
                "sticky_fallback_enabled": BOOL,
                "agg_shard_count": N,
                **_SETTINGS,
                **_CREDENTIALS,
                **_STAMPS,
            },
            {**_GRACE, "provisioning_api_key_hash": S},
        ),
    ),
    "app config": (
        "config",
        SeedTable(f"ORG#{_UUID}", "APP#[^#]+", {"app_name": S, **_CREDENTIALS, **_STAMPS}, {**_SETTINGS, **_GRACE}),
    ),
    "sticky state": (
        "sticky-state",
        SeedTable(
            _SCOPE,
            _DAY,
            {
                "active_model_label": S,
                "active_model_index": N,
                "reason": S,
                "previous_model_label": S,
                "activated_at_epoch": N,
                "expires_at_epoch": N,
            },
            {},
        ),
    ),
    "usage shard": (
        "usage-agg-sharded",
        SeedTable(f"{_SCOPE}#LABEL#[^#]+#SH#[0-9]+", _DAY, _COUNTERS, {"request_ids": SS}),
    ),
    "daily total": ("daily-total", SeedTable(f"{_SCOPE}#LABEL#[^#]+", _DAY, _COUNTERS, {})),
    "price": (
        "pricing-cache",
        SeedTable(
            "[^@]+",
            "[0-9]{4}-[0-9]{2}-[0-9]{2}",
            {
                "model_label": S,
                "tier": S,
                "family": S,
                "description": S,
                "input_price_usd_micros_per_1m": N,
                "output_price_usd_micros_per_1m": N,
                "fetched_at_epoch": N,
                "expires_at_epoch": N,
            },
            {},
        ),
    ),
    "revoked token": (
        "revoked-tokens",
        SeedTable(
            f"{_UUID}-[0-9]+",
            None,
            {
                "token_type": S,
                "client_id": S,
                "revoked_at_epoch": N,
                "original_expiry_epoch": N,
                "expires_at_epoch": N,
            },
            {},
        ),
    ),
    "retrieval token": (
        "secret-retrieval-tokens",
        SeedTable(
            _UUID,
            None,
            {
                "org_id": S,
                "secret_type": S,
                "client_id": S,
                "created_at_epoch": N,
                "expires_at_epoch": N,
                "used": BOOL,
            },
            {"app_id": S, "used_at_epoch": N},
        ),
    ),
}

# Where the schema is wrong on real DynamoDB, or the specification says otherwise: the kind of row, what differs, why.
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    ("org config", "SK"): "an empty string cannot be a key value; CONFIG",
    ("usage shard", "request_ids"): "a growing set doubles cost and ends at 400 KB; markers in request-dedup",
    ("price", "PK"): "prices differ by region; {model id}@{region}",
    ("revoked token", "PK"): "org and second collide; the token's id is a UUID, and SID#{uuid} revokes a session",
    ("retrieval token", "PK"): "the token itself would open the secret; the row is found by a hash of it",
}
ALLOWED_KEYS: Mapping[tuple[str, str], str] = {
    ("org config", "SK"): "CONFIG",
    ("price", "PK"): "[^@]+@[a-z0-9-]+",
    ("revoked token", "PK"): f"(?:SID#)?{_UUID}",
    ("retrieval token", "PK"): "[0-9a-f]{64}",
}
# Rows that the schema does not have, by table.
OWN_ROWS: Mapping[str, tuple[str, ...]] = {
    "config": (r"REGISTRY#ORGS \| ORG#.*", r"ORG#.* \| PROFILE#.*"),
    "pricing-cache": (r"PRICE-LIST@.* \| .*",),
    **dict.fromkeys(("request-dedup", "rate-buckets", "sessions", "audit"), (".*",)),
}
RawItem = dict[str, dict[str, Any]]


def find_kind(table: str, item: RawItem) -> str | None:
    """The kind of a row; None for a row of our own."""
    pk, sk = item["PK"]["S"], item.get("SK", {}).get("S")
    if any(re.fullmatch(pattern, f"{pk} | {sk}") for pattern in OWN_ROWS.get(table, ())):
        return None
    for kind, (of_table, seed) in SEED.items():
        keys = [
            (ALLOWED_KEYS.get((kind, name), pattern), value)
            for name, pattern, value in (("PK", seed.pk, pk), ("SK", seed.sk, sk))
        ]
        if of_table == table and all(
            (value is None) if pattern is None else value is not None and re.fullmatch(pattern, value)
            for pattern, value in keys
        ):
            return kind
    raise AssertionError(f"a row of {table} that the test does not describe: {pk} | {sk}")


def find_differences(kind: str, items: list[RawItem]) -> Iterator[tuple[str, str]]:
    """What the rows of a kind have otherwise than the schema. Each optional attribute must be in one of them."""
    seed = SEED[kind][1]
    for name, pattern in (("PK", seed.pk), ("SK", seed.sk)):
        if pattern is not None and not all(re.fullmatch(pattern, item[name]["S"]) for item in items):
            yield kind, name
    for name, expected in {**seed.attributes, **seed.optional}.items():
        types = {next(iter(item[name])) for item in items if name in item}
        is_complete = all(name in item for item in items) or name in seed.optional
        if types != {expected} or not is_complete:
            yield kind, name


@pytest.fixture(params=["moto", "ministack"])
async def dynamo(request: pytest.FixtureRequest, engines: Engines) -> AsyncIterator[DynamoStore]:
    """A store with tables of the test's own, so that all of its rows are known."""
    prefix, endpoint = f"seed-{uuid4().hex[:8]}-", engines.endpoints[request.param]
    store = await DynamoStore(region="us-east-1", table_prefix=prefix, endpoint=endpoint, sleep=asyncio.sleep).open()
    await create_missing_tables(store.client, prefix, asyncio.sleep, lambda *_: None)
    yield store
    for table in schema.TABLES:
        await store.client.update_table(TableName=prefix + table, DeletionProtectionEnabled=False)
        await store.client.delete_table(TableName=prefix + table)
    await store.close()


async def dump(store: DynamoStore) -> dict[str, list[RawItem]]:
    rows: dict[str, list[RawItem]] = {}
    for table in schema.TABLES:
        pages = store.client.get_paginator("scan").paginate(TableName=store._prefix + table)
        rows[table] = [item async for page in pages for item in page["Items"]]
    return rows


SETTINGS: dict[str, Any] = {
    "model_ordering": ["premium", "economy"],
    "quotas": {"premium": 10_000_000, "economy": 5_000_000},
    "sticky_fallback_enabled": True,
    "tight_mode_threshold_pct": 95,
    "refresh_interval_normal_secs": 300,
    "refresh_interval_tight_secs": 60,
}


async def play(api: ControlHarness) -> None:
    """Each flow that writes, by the product's own code."""
    org_path = f"/api/v1/orgs/{ORG}"
    shop = f"{org_path}/apps/{APP}"
    org = {"org_name": "sample_corp", "timezone": "America/New_York", "quota_scope": "APP", "agg_shard_count": 8}
    issued = {}
    for path, body in ((org_path, org | SETTINGS), (shop, {"app_name": "Production API"} | SETTINGS)):
        issued[path] = (await do(api, "PUT", path, body))["secret_retrieval_token"]
        await do(api, "GET", f"{path}/credentials/secret", who=None, headers={"X-Retrieval-Token": issued[path]})
        rotated = await do(api, "POST", f"{path}/credentials/rotate", {"grace_hours": 24})
        token = {"X-Retrieval-Token": rotated["secret_retrieval_token"]}
        pair = await do(api, "GET", f"{path}/credentials/secret", who=None, headers=token)
        await do(api, "POST", f"{path}/credentials/rotate", {"grace_hours": 24})  # left unused
        await do(api, "POST", f"{org_path}/admin-key", {"grace_hours": 1})
        sessions = [await do(api, "POST", "/auth/token", pair, who=None) for _ in range(7)]
        await do(api, "POST", "/auth/refresh", {"refresh_token": sessions[-1]["refresh_token"]}, who=None)
        await do(api, "POST", "/auth/revoke", {"token": sessions[-2]["access_token"]}, who=None)
        await do(api, "POST", "/auth/revoke", {"token": sessions[-2]["refresh_token"]}, who=None)
        await do(api, "DELETE", f"{path}/sessions/{sessions[-3]['session_id']}")
    usage = {"request_id": "r1", "label": "premium", "input_tokens": 1000, "output_tokens": 10}
    await do(api, "POST", f"{shop}/usage", usage, who=(ORG, APP))
    profile = {
        "label": "fast",
        "format": "nova",
        "prices_usd_per_1m": {"input": 1, "output": 2},
        "inference_profile_arn": "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123",
    }
    await do(api, "POST", f"{shop}/inference-profiles", profile)
    await TotalSweep(api.store, api.clock, Aggregator(api.store, api.clock, 60)).run()
    await fall_back(api)
    await read_prices(api)


async def do(api: ControlHarness, method: str, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
    answer = await api.ask(method, path, body, **more)
    assert answer.status in (200, 201), (method, path, answer.body)
    return dict(answer.body)


async def fall_back(api: ControlHarness) -> None:
    """The active label of the app moves on, and a person puts another one in force."""
    now, zone, scope = api.clock.now(), load_zone("America/New_York"), Scope(ORG, APP)
    item = await api.store.get(schema.org_config_key(ORG), consistent=True)
    settings = resolve_settings(item, None, DefaultsConfig(), ("premium", "economy"), now)
    span = find_span(Period.DAY, now, zone)
    await api.store.update(build_move(1, 0, scope, span, settings, now))
    await set_override(api.store, api.clock, scope, span, "premium", "a demo", "ann", ordering=("premium", "economy"))


class ListedHaiku:
    async def read(self, _: str) -> list[Product]:
        model = identify_model(MODEL)
        assert model is not None
        return [
            Product(model.name, "", "default", "", dimension, pico)
            for dimension, pico in (("input", 1_000_000), ("output", 5_000_000))
        ]


async def read_prices(api: ControlHarness) -> None:
    text = f"labels: {{standard: {{model: '{MODEL}', format: anthropic, prices_usd_per_1m: {{input: 1, output: 5}}}}}}"
    await PriceTables(parse_config(text, "config.yaml", {}), api.store, ListedHaiku(), api.clock).refresh()


async def test_every_stored_row_has_the_attributes_of_the_source_schema(dynamo: DynamoStore, tmp_path: Path) -> None:
    async with open_control_harness(dynamo, tmp_path, ManualClock()) as api:
        await play(api)
        now = int(api.clock.now())
    rows = await dump(dynamo)
    by_kind: dict[str, list[RawItem]] = {}
    for table, items in rows.items():
        assert items or table == "rate-buckets", f"the play wrote nothing to {table}"
        for item in items:
            kind = find_kind(table, item)
            if kind is not None:
                by_kind.setdefault(kind, []).append(item)
    assert by_kind.keys() == SEED.keys()
    differences = {each for kind, items in by_kind.items() for each in find_differences(kind, items)}
    assert differences == EXCEPTIONS.keys()
    check_values(by_kind, now)


def check_values(by_kind: Mapping[str, list[RawItem]], now: int) -> None:
    """What the schema says of single values."""
    assert {item["token_type"]["S"] for item in by_kind["revoked token"]} == {"access", "refresh"}
    for item in by_kind["revoked token"]:
        assert int(item["revoked_at_epoch"]["N"]) == now
        assert item["expires_at_epoch"] == item["original_expiry_epoch"]
    used = {item["used"]["BOOL"]: item for item in by_kind["retrieval token"]}
    assert used.keys() == {True, False}
    assert ("sealed" in used[True], "used_at_epoch" in used[True]) == (False, True)
    assert ("sealed" in used[False], "used_at_epoch" in used[False]) == (True, False)
    for item in by_kind["retrieval token"]:
        assert int(item["expires_at_epoch"]["N"]) == int(item["created_at_epoch"]["N"]) + 600
        assert (item["secret_type"]["S"] == "app") is ("app_id" in item)
    (sticky,) = by_kind["sticky state"]
    midnight = find_span(Period.DAY, now, load_zone("America/New_York")).end
    assert int(sticky["expires_at_epoch"]["N"]) == midnight + 3600
    (price,) = by_kind["price"]
    assert int(price["input_price_usd_micros_per_1m"]["N"]) == 1_000_000
    assert 2 * 86_400 <= int(price["expires_at_epoch"]["N"]) - int(price["fetched_at_epoch"]["N"]) <= 3 * 86_400
    (org,) = by_kind["org config"]
    for name in ("client_secret_hash", "provisioning_api_key_hash"):
        assert org[name]["S"].startswith("$2b$")
    (total,) = by_kind["daily total"]
    assert Decimal(total["cost_usd_micros"]["N"]) == sum(
        Decimal(item["cost_usd_micros"]["N"]) for item in by_kind["usage shard"]
    )


def test_comparison_finds_a_missing_and_a_mistyped_attribute() -> None:
    good: RawItem = {"PK": {"S": f"ORG#{ORG}"}, "SK": {"S": "DAY#20261118"}}
    types = SEED["sticky state"][1].attributes
    good |= {name: {kind: "1"} for name, kind in types.items()}
    assert list(find_differences("sticky state", [good])) == []
    missing = {name: value for name, value in good.items() if name != "reason"}
    assert list(find_differences("sticky state", [good, missing])) == [("sticky state", "reason")]
    mistyped = good | {"active_model_index": {"S": "1"}}
    assert list(find_differences("sticky state", [mistyped])) == [("sticky state", "active_model_index")]
    with pytest.raises(AssertionError, match="the test does not describe"):
        find_kind("sticky-state", {"PK": {"S": "X"}, "SK": {"S": "DAY#1"}})
