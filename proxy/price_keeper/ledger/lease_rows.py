"""The rows of hard budgets in the store, and every write to them. Pure. Money is whole pico-dollars.

    bucket   tk    unleased: what no process has leased; below zero if more was spent than the quota
             cp    the quota, and v, the version of the settings that it comes from
             base  what was spent without a lease, and at: when that was last reconciled
    lease    out   leased: all that one run of a process ever took, less what it released
             used  what of that is spent according to the journal, increased by each flush
             n     the sequence number of the last take or release, or CLOSED_SEQUENCE

    tk + sum of out + base = cp, at any time

Each take and release has the next sequence number. So a write whose answer was lost shows in `n`, and none is
applied twice, however late it arrives. Closing a row removes its number: writes of a dead process that arrive later
fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from zoneinfo import ZoneInfo

from price_keeper.domain import Scope
from price_keeper.errors import StoreMisconfigured
from price_keeper.org_calendar import parse_span_key
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeMissing,
    Condition,
    ConditionCheck,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    Put,
    Query,
    Update,
    Write,
    all_of,
    at_least,
    equals,
)
from price_keeper.stores.contract import Prefix as KeyPrefix

UNLEASED, QUOTA, VERSION, SPENT_WITHOUT_LEASE, RECONCILED_AT = "tk", "cp", "v", "base", "at"
LEASED, USED, SEQUENCE = "out", "used", "n"
CLOSED_SEQUENCE = -1  # stands in the place of the sequence number

DAY_SECONDS = 86_400
# One day for time zones in which the period ends later than in UTC, and one for calls in flight at its end.
LONG_PAST_SECONDS = 2 * DAY_SECONDS
ROW_RETENTION_SECONDS = 9 * DAY_SECONDS  # after the end of a period, for operators who look at it

_UTC = ZoneInfo("UTC")


class HardBudgetKey(NamedTuple):
    """Names a hard budget."""

    scope: str
    label: str
    period: str

    @property
    def bucket_key(self) -> Key:
        return schema.hard_bucket_key(Scope.from_key(self.scope), self.label, self.period)

    def build_lease_key(self, holder: str) -> Key:
        return schema.budget_lease_key(Scope.from_key(self.scope), self.label, self.period, holder)

    @property
    def lease_query(self) -> Query:
        prefix = KeyPrefix(schema.budget_leases_prefix(self.label, self.period))
        return Query("rate-buckets", Scope.from_key(self.scope).key, prefix, consistent=True)

    @property
    def expires_at(self) -> int:
        return parse_span_key(self.period, _UTC).end + ROW_RETENTION_SECONDS

    def is_long_past(self, now: float) -> bool:
        """No call can belong to this period any more, in any time zone, so its rows no longer matter."""
        return now > parse_span_key(self.period, _UTC).end + LONG_PAST_SECONDS


class HardBudgetBucket(NamedTuple):
    """The bucket's row: see the module's docstring."""

    unleased: int
    quota: int
    version: int
    spent_without_lease: int
    reconciled_at: int

    @classmethod
    def from_item(cls, item: Item) -> HardBudgetBucket:
        return cls(
            *(
                _read_whole(item, attribute)
                for attribute in (UNLEASED, QUOTA, VERSION, SPENT_WITHOUT_LEASE, RECONCILED_AT)
            )
        )


class BudgetLeaseRow(NamedTuple):
    """The row of one lease. `sequence` is None before anything was leased."""

    leased: int
    used: int
    sequence: int | None

    @classmethod
    def from_item(cls, item: Item | None) -> BudgetLeaseRow:
        item = item or {}
        sequence = _read_whole(item, SEQUENCE) if SEQUENCE in item else None
        return cls(_read_whole(item, LEASED, 0), _read_whole(item, USED, 0), sequence)

    @property
    def is_closed(self) -> bool:
        return self.sequence == CLOSED_SEQUENCE


def _read_whole(item: Item, attribute: str, default: int | None = None) -> int:
    value = item.get(attribute, default)
    if type(value) is not int:
        raise StoreMisconfigured(f"a hard budget's attribute {attribute} is missing or no whole number")
    return value


# Writes of the holder.


def build_take(key: HardBudgetKey, holder: str, sequence: int, pico: int, minimum: int) -> list[Write]:
    """Lease `pico`. `sequence` is the number of the last write, or 0; the bucket must have at least `minimum`."""
    bucket = Update(key.bucket_key, add={UNLEASED: -pico}, condition=at_least(UNLEASED, minimum))
    return [_build_sequenced_update(key, holder, sequence, pico), bucket]


def build_release(key: HardBudgetKey, holder: str, sequence: int, pico: int) -> list[Write]:
    return [
        _build_sequenced_update(key, holder, sequence, -pico),
        Update(key.bucket_key, add={UNLEASED: pico}, condition=ItemExists()),
    ]


def build_sequence_advance(key: HardBudgetKey, holder: str, sequence: int) -> list[Write]:
    """Advance the sequence number only: a write with this number that is still on its way fails from now on."""
    return [_build_sequenced_update(key, holder, sequence, 0)]


def _build_sequenced_update(key: HardBudgetKey, holder: str, sequence: int, change: int) -> Update:
    set_to = {SEQUENCE: sequence + 1, EXPIRY_ATTRIBUTE: key.expires_at}
    return Update(
        key.build_lease_key(holder),
        add={LEASED: change},
        set=set_to,
        condition=_build_equals(SEQUENCE, sequence or None),
    )


def _build_equals(attribute: str, value: int | None) -> Condition:
    return AttributeMissing(attribute) if value is None else equals(attribute, value)


def build_spend(key: HardBudgetKey, holder: str, pico: int) -> Update:
    """Belongs into the transaction that counts the same spend; the marker of that transaction makes it happen once."""
    return Update(key.build_lease_key(holder), add={USED: pico}, set={EXPIRY_ATTRIBUTE: key.expires_at})


# Closing, when the holder has ended and all of its spend is counted.


def build_close(key: HardBudgetKey, holder: str, item: Item | None, *, has_bucket: bool = True) -> list[Write]:
    """Close a lease and return its unspent money, if nothing has changed since `item` was read. A lease that never took
    anything is closed too, as a write of its holder may still be on its way."""
    lease = BudgetLeaseRow.from_item(item)
    as_read = all_of(*(_build_equals(name, _read_optional(item, name)) for name in (LEASED, USED, SEQUENCE)))
    set_to = {LEASED: lease.used, SEQUENCE: CLOSED_SEQUENCE, EXPIRY_ATTRIBUTE: key.expires_at}
    closing = Update(key.build_lease_key(holder), set=set_to, condition=as_read)
    unspent = lease.leased - lease.used
    if not unspent:
        return [closing]
    if not has_bucket:  # it will be created again, from the rows of the leases
        return [closing, ConditionCheck(key.bucket_key, ItemMissing())]
    return [closing, Update(key.bucket_key, add={UNLEASED: unspent}, condition=ItemExists())]


def _read_optional(item: Item | None, attribute: str) -> int | None:
    return _read_whole(item, attribute) if item is not None and attribute in item else None


# The bucket.


def compute_spent_without_lease(leases: Iterable[BudgetLeaseRow], spent_pico: int) -> int:
    """Spend that no lease pays for. Of each lease at most what was leased counts: what was spent beyond it was not
    leased."""
    return max(0, spent_pico - sum(min(lease.used, lease.leased) for lease in leases))


def build_bucket(
    key: HardBudgetKey, quota: int, version: int, leases: Iterable[BudgetLeaseRow], spent_pico: int, now: float
) -> Put:
    """Create the bucket. If it was lost and is created again, what leases have taken is not available."""
    leases = list(leases)
    spent_without_lease = compute_spent_without_lease(leases, spent_pico)
    unleased = quota - spent_without_lease - sum(lease.leased for lease in leases)
    item = {
        UNLEASED: unleased,
        QUOTA: quota,
        VERSION: version,
        SPENT_WITHOUT_LEASE: spent_without_lease,
        RECONCILED_AT: int(now),
        EXPIRY_ATTRIBUTE: key.expires_at,
    }
    return Put(key.bucket_key, item, ItemMissing())


def build_quota_change(key: HardBudgetKey, bucket: HardBudgetBucket, quota: int, version: int) -> Update:
    """Apply another quota of the settings; the unleased money changes by the difference."""
    as_read = all_of(equals(VERSION, bucket.version), equals(QUOTA, bucket.quota))
    moved = {UNLEASED: quota - bucket.quota}
    return Update(key.bucket_key, add=moved, set={QUOTA: quota, VERSION: version}, condition=as_read)


def build_reconcile(key: HardBudgetKey, bucket: HardBudgetBucket, spent_without_lease: int, now: float) -> Update:
    """Record the spend without lease; the unleased money changes by the difference."""
    as_read = all_of(
        equals(SPENT_WITHOUT_LEASE, bucket.spent_without_lease), equals(RECONCILED_AT, bucket.reconciled_at)
    )
    moved = {UNLEASED: bucket.spent_without_lease - spent_without_lease}
    return Update(
        key.bucket_key,
        add=moved,
        set={SPENT_WITHOUT_LEASE: spent_without_lease, RECONCILED_AT: int(now)},
        condition=as_read,
    )
