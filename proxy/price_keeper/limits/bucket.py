"""A bucket's arithmetic: what is in it now, and when there will be enough. Pure; whole numbers only.

Tokens are kept in thousandths. What an item says (`State`) and what the settings say (`Bucket`) meet in `in_force`:
whoever has older settings than the item goes by the item, so that an old sidecar does not undo a new limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from price_keeper.errors import StoreMisconfigured
from price_keeper.stores.contract import Item, Key, Value

MILLI: Final = 1000

# How far a process's idea of the store's time may be off. Two of them may be twice as far apart, each way of the truth.
SKEW_MS: Final = 2_000
FARTHEST_AHEAD_MS: Final = 2 * SKEW_MS

REFILLED_AT, VERSION = "rf", "v"
TOKENS, CONSUMED, REMAINDER, CAPACITY, AMOUNT, PERIOD = ATTRIBUTES = ("_tk", "_tc", "_rem", "_cp", "_ra", "_rp")


class Limit(NamedTuple):
    """`capacity` and `amount` in thousandths; of `amount` nothing, it never refills."""

    name: str
    capacity: int
    amount: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """As the settings have it. Without `expires_at` (epoch seconds) an item goes a day after it was last written to,
    or when it would be full anyway if that is later."""

    key: Key
    limits: tuple[Limit, ...]
    version: int
    expires_at: int | None = None

    @property
    def scope(self) -> str:
        return self.key.pk


class Stored(NamedTuple):
    """One limit as it stands in the item."""

    tokens: int
    consumed: int
    remainder: int
    capacity: int
    amount: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class State:
    refilled_at: int
    version: int
    limits: Mapping[str, Stored]


class Level(NamedTuple):
    """What is in a limit now, and how it comes to be: the `refill` may be negative, where the settings were lowered.

    `is_spilling`: something of what was earned is over the brim, so that `refill` is right for these very tokens alone.
    """

    tokens: int
    refill: int
    remainder: int
    is_spilling: bool


def state_of(item: Item) -> State:
    names = [name.removesuffix(TOKENS) for name in item if name.endswith(TOKENS)]
    limits = {name: _stored(item, name) for name in names}
    return State(_whole(item, REFILLED_AT), _whole(item, VERSION), limits)


def _stored(item: Item, name: str) -> Stored:
    stored = Stored(*(_whole(item, name + attribute) for attribute in ATTRIBUTES))
    if stored.period_ms <= 0 or stored.amount < 0 or stored.capacity < 0:
        raise StoreMisconfigured(f"a bucket's limit {name} has numbers that no limit has; delete the item")
    return stored


def item_of(state: State) -> dict[str, Value]:
    """What `state_of` reads."""
    kept = {
        name + attribute: value
        for name, stored in state.limits.items()
        for attribute, value in zip(ATTRIBUTES, stored, strict=True)
    }
    return {REFILLED_AT: state.refilled_at, VERSION: state.version, **kept}


def _whole(item: Item, name: str) -> int:
    value = item.get(name)
    if type(value) is not int:
        raise StoreMisconfigured(f"a bucket's attribute {name} is missing or no whole number; delete the item")
    return value


def in_force(bucket: Bucket, state: State | None) -> Bucket:
    """The settings to go by: those of the item where they are newer, a limit that they left out being no limit."""
    if state is None or state.version <= bucket.version:
        return bucket
    limits = (Limit(name, kept.capacity, kept.amount, kept.period_ms) for name, kept in state.limits.items())
    return replace(bucket, limits=tuple(limits), version=state.version)


def refilled_from(state: State, now_ms: int) -> int:
    """Since when refill is due. Nobody's clock may be so far ahead: whoever wrote that was wrong, and it counts for
    nothing, or the bucket would not refill until its time has come."""
    return state.refilled_at if state.refilled_at <= now_ms + FARTHEST_AHEAD_MS else now_ms


def levels(state: State, bucket: Bucket, now_ms: int) -> dict[str, Level]:
    """Every limit in force. Time before a change of settings counts by the new ones: else a limit whose refill was
    nothing would refuse all, and as a refusal writes nothing, the new rate would never get into the item."""
    elapsed = max(0, now_ms - refilled_from(state, now_ms))
    return {
        limit.name: _level(limit, state.limits.get(limit.name), elapsed) for limit in in_force(bucket, state).limits
    }


def _level(limit: Limit, kept: Stored | None, elapsed: int) -> Level:
    if kept is None:  # new in the settings: it starts full
        return Level(limit.capacity, limit.capacity, 0, False)
    earned, remainder = _earned(limit, kept, elapsed)
    if kept.tokens + earned < limit.capacity:
        return Level(kept.tokens + earned, earned, remainder, False)
    refill = limit.capacity - kept.tokens
    return Level(limit.capacity, refill, 0, refill != earned or remainder != 0)


def _earned(limit: Limit, kept: Stored, elapsed: int) -> tuple[int, int]:
    if limit.amount == 0:
        # What never refills is an amount to be used once: more of it is more to use, and less is less.
        return (limit.capacity - kept.capacity if kept.amount == 0 else 0), 0
    return divmod(elapsed * limit.amount + _remainder(limit, kept), limit.period_ms)


def _remainder(limit: Limit, kept: Stored) -> int:
    """It is a part of the period: of another period it means nothing."""
    return kept.remainder if kept.period_ms == limit.period_ms else 0


def effective(state: State, bucket: Bucket, now_ms: int) -> dict[str, int]:
    """Tokens there now, by limit in force. Below zero where more was used than was taken."""
    return {name: level.tokens for name, level in levels(state, bucket, now_ms).items()}


def wait_ms(state: State, bucket: Bucket, costs: Mapping[str, int], now_ms: int) -> int | None:
    """Until `costs` would fit, if nobody else takes anything. None: never, by these settings."""
    longest = 0
    for limit in in_force(bucket, state).limits:
        cost = costs.get(limit.name, 0)
        wait = _wait(limit, state, cost, now_ms) if cost > 0 else 0
        if wait is None:
            return None
        longest = max(longest, wait)
    return longest


def _wait(limit: Limit, state: State, cost: int, now_ms: int) -> int | None:
    kept = state.limits.get(limit.name)
    if cost > limit.capacity:
        return None
    if kept is None:
        return 0
    start = refilled_from(state, now_ms)
    if _level(limit, kept, max(0, now_ms - start)).tokens >= cost:
        return 0
    if limit.amount == 0:
        return None
    missing = (cost - kept.tokens) * limit.period_ms - _remainder(limit, kept)
    return start - now_ms - (-missing // limit.amount)
