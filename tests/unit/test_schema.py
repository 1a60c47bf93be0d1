"""Keys: as documented, never shared by two things, never built from what no key may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.domain import Scope, is_app_id, is_label, is_org_id
from price_keeper.stores import schema
from price_keeper.stores.contract import Key
from price_keeper.stores.item_values import check_key

ORG = "550e8400-e29b-41d4-a716-446655440000"
WHOLE, APP = Scope(ORG), Scope(ORG, "app-1")
DAY = "DAY#20261118"
ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
OTHER_ULID = "01BX5ZZKBKACTAV9WEVGEMMVRZ"

DOCUMENTED = {
    schema.org_config_key(ORG): ("config", f"ORG#{ORG}", "CONFIG"),
    schema.app_config_key(ORG, "app-1"): ("config", f"ORG#{ORG}", "APP#app-1"),
    schema.org_entry_key(ORG): ("config", "REGISTRY#ORGS", f"ORG#{ORG}"),
    schema.sticky_state_key(APP, DAY): ("sticky-state", f"ORG#{ORG}#APP#app-1", DAY),
    schema.usage_shard_key(WHOLE, "premium", 3, DAY): ("usage-agg-sharded", f"ORG#{ORG}#LABEL#premium#SH#3", DAY),
    schema.total_key(WHOLE, "premium", "WEEK#2026-W47"): (
        "daily-total",
        f"ORG#{ORG}#LABEL#premium",
        "WEEK#2026-W47",
    ),
    schema.price_key("amazon.nova-lite-v1:0", "us-east-1", "2026-11-18"): (
        "pricing-cache",
        "amazon.nova-lite-v1:0@us-east-1",
        "2026-11-18",
    ),
    schema.revoked_token_key("jti"): ("revoked-tokens", "jti", ""),
    schema.revoked_session_key("sid"): ("revoked-tokens", "SID#sid", ""),
    schema.session_head_key("org-1"): ("sessions", "org-1", "HEAD"),
    schema.session_key("org-1", "sid"): ("sessions", "org-1", "SESSION#sid"),
    schema.refused_refresh_token_key("0f" * 32): ("sessions", f"BLOCK#refresh#{'0f' * 32}", "BLOCK"),
    schema.retrieval_token_key("hash"): ("secret-retrieval-tokens", "hash", ""),
    schema.segment_marker_key(ULID, 7): ("request-dedup", f"SEG#{ULID}", "PART#0007"),
    schema.request_marker_key(ORG, None, "a"): ("request-dedup", f"REQ#{ORG}##a", "MARKER"),
    schema.request_marker_key(ORG, "app-1", "a#b"): ("request-dedup", f"REQ#{ORG}#app-1#a#b", "MARKER"),
    schema.alert_marker_key(WHOLE, "premium", DAY, 80): (
        "request-dedup",
        f"ALERT#ORG#{ORG}#LABEL#premium#{DAY}",
        "PCT#080",
    ),
    schema.active_counter_key("20261118", APP, "premium", "MONTH#202611"): (
        "request-dedup",
        "ACTIVE#20261118",
        f"ORG#{ORG}#APP#app-1#LABEL#premium#MONTH#202611",
    ),
    schema.rate_bucket_key(APP, "rpm"): ("rate-buckets", f"ORG#{ORG}#APP#app-1", "BUCKET#rpm"),
    schema.hard_bucket_key(APP, "premium", DAY): ("rate-buckets", f"ORG#{ORG}#APP#app-1", f"BUCKET#HARD#premium#{DAY}"),
    schema.budget_lease_key(APP, "premium", DAY, ULID): (
        "rate-buckets",
        f"ORG#{ORG}#APP#app-1",
        f"HOLD#premium#{DAY}#{ULID}",
    ),
}


@pytest.mark.parametrize(("key", "expected"), DOCUMENTED.items(), ids=lambda value: str(value[0]))
def test_keys_are_as_documented(key: Key, expected: tuple[str, str, str]) -> None:
    assert tuple(key) == expected
    check_key(key)


def test_documented_keys_are_distinct() -> None:
    assert len(DOCUMENTED) == 21


ORGS = st.sampled_from([ORG, "00000000-0000-4000-8000-000000000001"])
APPS = st.one_of(st.none(), st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True).filter(is_app_id))
LABELS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
PERIODS = st.sampled_from([DAY, "DAY#20261119", "WEEK#2026-W47", "MONTH#202611"])
SCOPES = st.builds(Scope, ORGS, APPS)
COUNTERS = st.tuples(SCOPES, LABELS, st.integers(0, 63), PERIODS)


@given(COUNTERS, COUNTERS)
def test_two_counters_never_share_a_key(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (schema.usage_shard_key(*one) == schema.usage_shard_key(*other)) == (one == other)


BAD: dict[str, Callable[[], object]] = {
    "an org that is no UUID": lambda: Scope("acme"),
    "an org in capitals": lambda: Scope(ORG.upper()),
    "an org in braces": lambda: Scope("{" + ORG + "}"),
    "an app with #": lambda: Scope(ORG, "a#APP#b"),
    "an empty app": lambda: Scope(ORG, ""),
    "an app too long": lambda: Scope(ORG, "a" * 65),
    "an app with a line's end": lambda: Scope(ORG, "a\n"),
    "a label with #": lambda: schema.total_key(WHOLE, "a#SH#1", DAY),
    "a period of another form": lambda: schema.total_key(WHOLE, "premium", "20261118"),
    "a negative shard": lambda: schema.usage_shard_key(WHOLE, "premium", -1, DAY),
    "a token id with #": lambda: schema.revoked_token_key("SID#x"),
    "a session id with #": lambda: schema.session_key("org-1", "a#b"),
    "a hash that is none": lambda: schema.refused_refresh_token_key("token"),
    "a segment that is no ULID": lambda: schema.segment_marker_key(ULID.lower(), 0),
    "a region with @": lambda: schema.price_key("m", "us@east", "2026-11-18"),
    "a date of another form": lambda: schema.price_key("m", "us-east-1", "20261118"),
    "a day in other digits": lambda: schema.total_key(WHOLE, "premium", "DAY#٢٠٢٦١١١٨"),
    "a request of an app without a name": lambda: schema.request_marker_key(ORG, "", "1"),
    "a UTC day of another form": lambda: schema.active_counters_partition("2026-11-18"),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_invalid_key_part_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        make()


def test_shard_choice_is_deterministic_and_spread() -> None:
    assert [schema.choose_shard(ULID, count) for count in schema.SHARD_COUNTS] == [4, 4, 4, 4]
    assert [schema.choose_shard(OTHER_ULID, count) for count in schema.SHARD_COUNTS] == [6, 14, 30, 62]
    ulids = [f"01ARZ3NDEKTSV4RRFFQ69{number:05}" for number in range(8000)]
    counts = [0] * 8
    for ulid in ulids:
        counts[schema.choose_shard(ulid, 8)] += 1
    assert min(counts) > 850
    assert max(counts) < 1150


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (is_org_id, [ORG], ["", ORG[:-1], ORG.replace("-", ""), f"urn:uuid:{ORG}", ORG + "\n"]),
        (
            is_app_id,
            ["a", "A.b_c-9", "a" * 64, "...", "..a", ".a"],
            ["", "a b", "a/b", "ä", "a" * 65, "a\n", ".", "..", "..\n"],
        ),
        (is_label, ["premium", "my.label-1"], ["", "a#b", "a b", "a" * 65, "..", ".", "-a", "a..b"]),
    ],
)
def test_ids_are_validated(check: Callable[[str], bool], good: list[str], bad: list[str]) -> None:
    assert all(check(text) for text in good)
    assert not any(check(text) for text in bad)
