"""The items of a hard budget, and every write to them. Pure. Money is whole pico-dollars.

    bucket   tk    what nobody holds; below zero where more was spent than there is
             cp    the quota, and v, the version of the settings that it comes from
             base  what was spent without a hold, as far as it is known, and at: when somebody last looked
    hold     out   all that one run of a process ever took, less what it gave back
             used  what of that is spent, as its journal says, counted up by each flush
             n     how often it took or gave back; or that it is closed, and never will again

    tk + sum of out + base = cp, whatever happens

Each taking and giving back has the next number, so one whose answer was lost shows in `n`, and none is made twice,
however late it arrives. Closing takes the number away: what a process that is no more had sent comes too late.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from zoneinfo import ZoneInfo

from price_keeper.calendar_days import parse_span_key
from price_keeper.errors import StoreMisconfigured
from price_keeper.model import Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    ConditionCheck,
    Condition,
    Item,
    ItemExists,
    ItemMissing,
    Key,
    AttributeMissing,
    Put,
    Query,
    Update,
    Write,
    all_of,
    at_least,
    equals,
)
from price_keeper.stores.contract import Prefix as KeyPrefix

LEFT, QUOTA, VERSION, BASE, SEEN = "tk", "cp", "v", "base", "at"
OUT, USED, NUMBER = "out", "used", "n"
CLOSED = -1  # in the place of the number

DAY_SECONDS = 86_400
# A day for zones in which the period ends later than in UTC, and one for calls under way at its end.
OVER_SECONDS = 2 * DAY_SECONDS
KEPT_SECONDS = 9 * DAY_SECONDS  # after a period's end, for whoever wants to see how it was

_UTC = ZoneInfo("UTC")


class Name(NamedTuple):
    """Of a hard budget: whose, for what, and when."""

    scope: str
    label: str
    period: str

    @property
    def bucket(self) -> Key:
        return schema.hard_bucket_key(Scope.from_key(self.scope), self.label, self.period)

    def hold(self, holder: str) -> Key:
        return schema.budget_lease_key(Scope.from_key(self.scope), self.label, self.period, holder)

    @property
    def holds(self) -> Query:
        prefix = KeyPrefix(schema.budget_leases_prefix(self.label, self.period))
        return Query("rate-buckets", Scope.from_key(self.scope).key, prefix, consistent=True)

    @property
    def expires_at(self) -> int:
        return parse_span_key(self.period, _UTC).end + KEPT_SECONDS

    def is_long_over(self, now: float) -> bool:
        """Nobody calls in this period any more, whatever the zone, so nothing in it matters."""
        return now > parse_span_key(self.period, _UTC).end + OVER_SECONDS


class Bucket(NamedTuple):
    left: int
    quota: int
    version: int
    base: int
    seen_at: int

    @classmethod
    def of(cls, item: Item) -> Bucket:
        return cls(*(_whole(item, name) for name in (LEFT, QUOTA, VERSION, BASE, SEEN)))


class Hold(NamedTuple):
    """`number` is None before anything was taken."""

    out: int
    used: int
    number: int | None

    @classmethod
    def of(cls, item: Item | None) -> Hold:
        item = item or {}
        number = _whole(item, NUMBER) if NUMBER in item else None
        return cls(_whole(item, OUT, 0), _whole(item, USED, 0), number)

    @property
    def is_closed(self) -> bool:
        return self.number == CLOSED


def _whole(item: Item, name: str, default: int | None = None) -> int:
    value = item.get(name, default)
    if type(value) is not int:
        raise StoreMisconfigured(f"a hard budget's attribute {name} is missing or no whole number")
    return value


# What the holder does.


def taken(name: Name, holder: str, number: int, pico: int, least: int) -> list[Write]:
    """`number` of the last one, or 0; at `least` so much must be there."""
    bucket = Update(name.bucket, add={LEFT: -pico}, condition=at_least(LEFT, least))
    return [_numbered(name, holder, number, pico), bucket]


def given_back(name: Name, holder: str, number: int, pico: int) -> list[Write]:
    return [
        _numbered(name, holder, number, -pico),
        Update(name.bucket, add={LEFT: pico}, condition=ItemExists()),
    ]


def moved_on(name: Name, holder: str, number: int) -> list[Write]:
    """What was sent with this number, and is still on its way, comes too late from now on."""
    return [_numbered(name, holder, number, 0)]


def _numbered(name: Name, holder: str, number: int, out: int) -> Update:
    set_to = {NUMBER: number + 1, EXPIRY_ATTRIBUTE: name.expires_at}
    return Update(name.hold(holder), add={OUT: out}, set=set_to, condition=_is(NUMBER, number or None))


def _is(attribute: str, value: int | None) -> Condition:
    return AttributeMissing(attribute) if value is None else equals(attribute, value)


def spent(name: Name, holder: str, pico: int) -> Update:
    """Belongs into the transaction that counts the same spend, whose marker makes it happen once."""
    return Update(name.hold(holder), add={USED: pico}, set={EXPIRY_ATTRIBUTE: name.expires_at})


# When its holder is no more, and all that it spent is counted.


def closed(name: Name, holder: str, item: Item | None, *, has_bucket: bool = True) -> list[Write]:
    """What was never spent goes back, if nothing has moved since `item` was read. One that never took anything is
    closed all the same: what was sent may still be on its way."""
    hold = Hold.of(item)
    as_read = all_of(*(_is(each, _found(item, each)) for each in (OUT, USED, NUMBER)))
    set_to = {OUT: hold.used, NUMBER: CLOSED, EXPIRY_ATTRIBUTE: name.expires_at}
    closing = Update(name.hold(holder), set=set_to, condition=as_read)
    rest = hold.out - hold.used
    if not rest:
        return [closing]
    if not has_bucket:  # it will be made anew, from what the holds say
        return [closing, ConditionCheck(name.bucket, ItemMissing())]
    return [closing, Update(name.bucket, add={LEFT: rest}, condition=ItemExists())]


def _found(item: Item | None, attribute: str) -> int | None:
    return _whole(item, attribute) if item is not None and attribute in item else None


# The bucket.


def unheld(holds: Iterable[Hold], spent_pico: int) -> int:
    """What was spent that no hold pays for. Of a hold no more than was taken: what goes beyond is nobody's."""
    return max(0, spent_pico - sum(min(hold.used, hold.out) for hold in holds))


def made(name: Name, quota: int, version: int, holds: Iterable[Hold], spent_pico: int, now: float) -> Put:
    """What stands in holds is out, should a bucket be lost and made again."""
    holds = list(holds)
    base = unheld(holds, spent_pico)
    left = quota - base - sum(hold.out for hold in holds)
    item = {LEFT: left, QUOTA: quota, VERSION: version, BASE: base, SEEN: int(now), EXPIRY_ATTRIBUTE: name.expires_at}
    return Put(name.bucket, item, ItemMissing())


def changed(name: Name, bucket: Bucket, quota: int, version: int) -> Update:
    """The settings have another quota; what there is moves by the difference."""
    as_read = all_of(equals(VERSION, bucket.version), equals(QUOTA, bucket.quota))
    moved = {LEFT: quota - bucket.quota}
    return Update(name.bucket, add=moved, set={QUOTA: quota, VERSION: version}, condition=as_read)


def reconciled(name: Name, bucket: Bucket, base: int, now: float) -> Update:
    as_read = all_of(equals(BASE, bucket.base), equals(SEEN, bucket.seen_at))
    moved = {LEFT: bucket.base - base}
    return Update(name.bucket, add=moved, set={BASE: base, SEEN: int(now)}, condition=as_read)
