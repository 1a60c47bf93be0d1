"""The tables, and one function for each kind of key in them. Pure.

Table names here are without the configured prefix, and some are older than their use: `daily-total` also has the totals
of weeks and months, and `request-dedup` also has the list of active counters. The parts of a key are joined by '#',
which ids and labels cannot contain, so keys never collide. Periods have the form of `org_calendar`, for example
`DAY#20261118`. The functions raise ValueError for a malformed part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

from price_keeper.domain import Scope, is_app_id, is_label
from price_keeper.stores.contract import Key


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    has_sort_key: bool
    purpose: str


def _index_by_name(*tables: Table) -> dict[str, Table]:
    return {table.name: table for table in tables}


TABLES = _index_by_name(
    Table("config", True, "orgs, apps, their credentials' hashes, and the registry of orgs"),
    Table("sticky-state", True, "the active label of a scope in a period, and manual overrides"),
    Table("usage-agg-sharded", True, "usage counters of a scope, label and period, spread over shards"),
    Table("daily-total", True, "the sum of the shards by day, week or month, rewritten by the aggregator"),
    Table("pricing-cache", True, "prices of a model in a region by the day they were read"),
    Table("revoked-tokens", False, "revoked tokens and sessions"),
    Table("secret-retrieval-tokens", False, "secrets waiting to be fetched once"),
    Table("request-dedup", True, "markers of counted segments and raised alerts, and the active counters"),
    Table("rate-buckets", True, "token buckets: limits, hard budgets, leases"),
    Table("sessions", True, "refresh sessions of clients, and refused refresh tokens"),
    Table("audit", True, "every administrative change, append only"),
)

SHARD_COUNTS = (8, 16, 32, 64)
ACTIVE_COUNTERS_TABLE = "request-dedup"

_ORG_CONFIG = "CONFIG"
_MARKER = "MARKER"
_ULID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UTC_DAY = re.compile(r"[0-9]{8}")
_PERIOD = re.compile(r"DAY#[0-9]{8}|WEEK#[0-9]{4}-W[0-9]{2}|MONTH#[0-9]{6}")


def org_config_key(org: str) -> Key:
    return Key("config", Scope(org).key, _ORG_CONFIG)


def app_config_key(org: str, app: str) -> Key:
    return Key("config", Scope(org).key, f"{APPS_PREFIX}{_require(app, is_app_id(app), 'app id')}")


APPS_PREFIX = "APP#"

ORG_REGISTRY = "REGISTRY#ORGS"


def org_entry_key(org: str) -> Key:
    """The org's entry in the registry partition, which lists all orgs without a scan."""
    return Key("config", ORG_REGISTRY, Scope(org).key)


def sticky_state_key(scope: Scope, period: str) -> Key:
    return Key("sticky-state", scope.key, _require_period(period))


def usage_shard_key(scope: Scope, label: str, shard: int, period: str) -> Key:
    if shard < 0:
        raise ValueError(f"a shard's number is not negative, as {shard} is")
    return Key("usage-agg-sharded", f"{_join_scope_and_label(scope, label)}#SH#{shard}", _require_period(period))


def total_key(scope: Scope, label: str, period: str) -> Key:
    return Key("daily-total", _join_scope_and_label(scope, label), _require_period(period))


def price_key(model: str, region: str, date: str) -> Key:
    """`date` is YYYY-MM-DD, so that the newest price not after a day is one short query."""
    if "@" in region:
        raise ValueError(f"not a region: {region!r}")
    return Key("pricing-cache", f"{model}@{region}", _require(date, bool(_DATE.fullmatch(date)), "date"))


def revoked_token_key(jti: str) -> Key:
    return Key("revoked-tokens", _require(jti, "#" not in jti, "token id"))


def revoked_session_key(sid: str) -> Key:
    return Key("revoked-tokens", f"SID#{_require(sid, '#' not in sid, 'session id')}")


def session_head_key(client_id: str) -> Key:
    """The item with the version that every change of a client's set of sessions increments."""
    return Key("sessions", client_id, "HEAD")


def session_key(client_id: str, sid: str) -> Key:
    return Key("sessions", client_id, f"{SESSIONS_PREFIX}{_require(sid, '#' not in sid, 'session id')}")


SESSIONS_PREFIX = "SESSION#"


def refused_refresh_token_key(token_hash: str) -> Key:
    return Key(
        "sessions", f"BLOCK#refresh#{_require(token_hash, bool(_SHA256.fullmatch(token_hash)), 'hash')}", "BLOCK"
    )


def retrieval_token_key(token_hash: str) -> Key:
    return Key("secret-retrieval-tokens", token_hash)


def segment_marker_key(ulid: str, part: int, start: int = 0) -> Key:
    """The marker of one part of the lines of a segment that were counted together, from line `start` on.

    Markers that begin with the first line keep the name that older versions look for, which know no other start.
    """
    sort_key = f"LINES#{start:010}#PART#{part:04}" if start else f"PART#{part:04}"
    return Key("request-dedup", segment_markers_partition(ulid), sort_key)


def segment_markers_partition(ulid: str) -> str:
    """The partition with all markers of one segment."""
    return f"SEG#{_require(ulid, bool(_ULID.fullmatch(ulid)), 'ULID')}"


def request_marker_key(org: str, app: str | None, request_id: str) -> Key:
    """The marker of usage of an app or, with None, of its org's own client, whose name is empty as no app's is."""
    name = "" if app is None else _require(app, isinstance(app, str) and is_app_id(app), "app id")
    return Key("request-dedup", f"REQ#{Scope(org).org}#{name}#{request_id}", _MARKER)


def alert_marker_key(scope: Scope, label: str, period: str, threshold_pct: int) -> Key:
    return Key(
        "request-dedup",
        f"ALERT#{_join_scope_and_label(scope, label)}#{_require_period(period)}",
        f"PCT#{threshold_pct:03}",
    )


def active_counters_partition(utc_day: str) -> str:
    """The partition that lists the counters which were written to on a UTC day (YYYYMMDD)."""
    return f"ACTIVE#{_require(utc_day, bool(_UTC_DAY.fullmatch(utc_day)), 'UTC day')}"


def active_counter_key(utc_day: str, scope: Scope, label: str, period: str) -> Key:
    return Key(
        ACTIVE_COUNTERS_TABLE,
        active_counters_partition(utc_day),
        f"{_join_scope_and_label(scope, label)}#{_require_period(period)}",
    )


def totals_sweep_key() -> Key:
    """The row that says when the fleet last swept its totals."""
    return Key("request-dedup", "SWEEP#TOTALS", _MARKER)


def audit_record_key(org: str, name: str) -> Key:
    """`name` begins with the time, so that records stand in the order in which they were made."""
    return Key("audit", Scope(org).key, name)


PROFILES_PREFIX = "PROFILE#"


def inference_profile_key(org: str, app: str, label: str) -> Key:
    """The sort key has a prefix of its own, outside that of the apps: apps are listed by their prefix."""
    sort_key = f"{app_profiles_prefix(app)}{_require(label, is_label(label), 'label')}"
    return Key("config", Scope(org).key, sort_key)


def app_profiles_prefix(app: str) -> str:
    return f"{PROFILES_PREFIX}{_require(app, is_app_id(app), 'app id')}#"


def rate_bucket_key(scope: Scope, name: str) -> Key:
    return Key("rate-buckets", scope.key, f"BUCKET#{name}")


def control_bucket_key(who: str) -> Key:
    """The token bucket of one caller of the control API."""
    return Key("rate-buckets", f"CONTROL#{who}", "BUCKET#CALLS")


def hard_bucket_key(scope: Scope, label: str, period: str) -> Key:
    """The bucket with the part of a hard budget that is not leased."""
    return Key(
        "rate-buckets", scope.key, f"BUCKET#HARD#{_require(label, is_label(label), 'label')}#{_require_period(period)}"
    )


def budget_lease_key(scope: Scope, label: str, period: str, lease_id: str) -> Key:
    """The lease of one run of one process on a hard budget."""
    sort_key = f"{budget_leases_prefix(label, period)}{_require(lease_id, bool(_ULID.fullmatch(lease_id)), 'ULID')}"
    return Key("rate-buckets", scope.key, sort_key)


def budget_leases_prefix(label: str, period: str) -> str:
    """The prefix of all leases on one hard budget, in the partition of its scope. HOLD is their older, public name."""
    return f"HOLD#{_require(label, is_label(label), 'label')}#{_require_period(period)}#"


def choose_shard(ulid: str, shard_count: int) -> int:
    """The shard of a segment: the same on every machine. `hash()` differs per process."""
    return int.from_bytes(sha256(ulid.encode()).digest()) % shard_count


def _join_scope_and_label(scope: Scope, label: str) -> str:
    return f"{scope.key}#LABEL#{_require(label, is_label(label), 'label')}"


def _require_period(period: str) -> str:
    return _require(period, bool(_PERIOD.fullmatch(period)), "period")


def _require(text: str, is_valid: bool, what: str) -> str:
    if not is_valid:
        raise ValueError(f"not a {what}: {text!r}")
    return text
