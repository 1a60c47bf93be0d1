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
CLOSED_SEQUENCE = -1  # in the place of the number

DAY_SECONDS = 86_400
# A day for zones in which the period ends later than in UTC, and one for calls under way at its end.
LONG_PAST_SECONDS = 2 * DAY_SECONDS
ROW_RETENTION_SECONDS = 9 * DAY_SECONDS  # after a period's end, for whoever wants to see how it was

_UTC = ZoneInfo("UTC")


class HardBudgetKey(NamedTuple):
    """Of a hard budget: whose, for what, and when."""

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
        """Nobody calls in this period any more, whatever the zone, so nothing in it matters."""
        return now > parse_span_key(self.period, _UTC).end + LONG_PAST_SECONDS


class HardBudgetBucket(NamedTuple):
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
    """`number` is None before anything was taken."""

    leased: int
    used: int
    sequence: int | None

    @classmethod
    def from_item(cls, item: Item | None) -> BudgetLeaseRow:
        item = item or {}
        number = _read_whole(item, SEQUENCE) if SEQUENCE in item else None
        return cls(_read_whole(item, LEASED, 0), _read_whole(item, USED, 0), number)

    @property
    def is_closed(self) -> bool:
        return self.sequence == CLOSED_SEQUENCE


def _read_whole(item: Item, attribute: str, default: int | None = None) -> int:
    value = item.get(attribute, default)
    if type(value) is not int:
        raise StoreMisconfigured(f"a hard budget's attribute {attribute} is missing or no whole number")
    return value


# What the holder does.


def build_take(key: HardBudgetKey, holder: str, sequence: int, pico: int, minimum: int) -> list[Write]:
    """`number` of the last one, or 0; at `least` so much must be there."""
    bucket = Update(key.bucket_key, add={UNLEASED: -pico}, condition=at_least(UNLEASED, minimum))
    return [_build_sequenced_update(key, holder, sequence, pico), bucket]


def build_release(key: HardBudgetKey, holder: str, sequence: int, pico: int) -> list[Write]:
    return [
        _build_sequenced_update(key, holder, sequence, -pico),
        Update(key.bucket_key, add={UNLEASED: pico}, condition=ItemExists()),
    ]


def build_sequence_advance(key: HardBudgetKey, holder: str, sequence: int) -> list[Write]:
    """What was sent with this number, and is still on its way, comes too late from now on."""
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
    """Belongs into the transaction that counts the same spend, whose marker makes it happen once."""
    return Update(key.build_lease_key(holder), add={USED: pico}, set={EXPIRY_ATTRIBUTE: key.expires_at})


# When its holder is no more, and all that it spent is counted.


def build_close(key: HardBudgetKey, holder: str, item: Item | None, *, has_bucket: bool = True) -> list[Write]:
    """What was never spent goes back, if nothing has moved since `item` was read. One that never took anything is
    closed all the same: what was sent may still be on its way."""
    lease = BudgetLeaseRow.from_item(item)
    as_read = all_of(*(_build_equals(each, _read_optional(item, each)) for each in (LEASED, USED, SEQUENCE)))
    set_to = {LEASED: lease.used, SEQUENCE: CLOSED_SEQUENCE, EXPIRY_ATTRIBUTE: key.expires_at}
    closing = Update(key.build_lease_key(holder), set=set_to, condition=as_read)
    unspent = lease.leased - lease.used
    if not unspent:
        return [closing]
    if not has_bucket:  # it will be made anew, from what the holds say
        return [closing, ConditionCheck(key.bucket_key, ItemMissing())]
    return [closing, Update(key.bucket_key, add={UNLEASED: unspent}, condition=ItemExists())]


def _read_optional(item: Item | None, attribute: str) -> int | None:
    return _read_whole(item, attribute) if item is not None and attribute in item else None


# The bucket.


def compute_spent_without_lease(leases: Iterable[BudgetLeaseRow], spent_pico: int) -> int:
    """What was spent that no hold pays for. Of a hold no more than was taken: what goes beyond is nobody's."""
    return max(0, spent_pico - sum(min(lease.used, lease.leased) for lease in leases))


def build_bucket(
    key: HardBudgetKey, quota: int, version: int, leases: Iterable[BudgetLeaseRow], spent_pico: int, now: float
) -> Put:
    """What stands in holds is out, should a bucket be lost and made again."""
    leases = list(leases)
    spent_without_lease = compute_spent_without_lease(leases, spent_pico)
    unleased = quota - spent_without_lease - sum(hold.leased for hold in leases)
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
    """The settings have another quota; what there is moves by the difference."""
    as_read = all_of(equals(VERSION, bucket.version), equals(QUOTA, bucket.quota))
    moved = {UNLEASED: quota - bucket.quota}
    return Update(key.bucket_key, add=moved, set={QUOTA: quota, VERSION: version}, condition=as_read)


def build_reconcile(key: HardBudgetKey, bucket: HardBudgetBucket, spent_without_lease: int, now: float) -> Update:
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
