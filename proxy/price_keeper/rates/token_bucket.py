"""The arithmetic of a token bucket: what is in it now, and when there will be enough. Pure; integers only.

Tokens are counted in thousandths (`MILLI`). A bucket holds several limits, such as requests and tokens a minute.
`RateBucket` is what the configuration says, `StoredBucket` what the item in the store says. `resolve_bucket` decides
between them: the newer version wins, so a process with an old configuration cannot undo a new limit.
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
MAX_AHEAD_MS: Final = 2 * SKEW_MS

REFILLED_AT, VERSION = "rf", "v"
TOKENS, CONSUMED, REMAINDER, CAPACITY, AMOUNT, PERIOD = ATTRIBUTES = ("_tk", "_tc", "_rem", "_cp", "_ra", "_rp")


class RateLimit(NamedTuple):
    """`capacity` and `amount` in thousandths; of `amount` nothing, it never refills."""

    name: str
    capacity: int
    amount: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class RateBucket:
    """As the settings have it. Without `expires_at` (epoch seconds) an item goes a day after it was last written to,
    or when it would be full anyway if that is later."""

    key: Key
    limits: tuple[RateLimit, ...]
    version: int
    expires_at: int | None = None

    @property
    def scope(self) -> str:
        return self.key.pk


class StoredLimit(NamedTuple):
    """One limit as it stands in the item."""

    tokens: int
    consumed: int
    remainder: int
    capacity: int
    amount: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class StoredBucket:
    refilled_at: int
    version: int
    limits: Mapping[str, StoredLimit]


class LimitLevel(NamedTuple):
    """What is in a limit now, and how it comes to be: the `refill` may be negative, where the settings were lowered.

    `is_spilling`: something of what was earned is over the brim, so that `refill` is right for these very tokens alone.
    """

    tokens: int
    refill: int
    remainder: int
    is_capped: bool


def parse_stored_bucket(item: Item) -> StoredBucket:
    names = [name.removesuffix(TOKENS) for name in item if name.endswith(TOKENS)]
    limits = {name: _read_limit(item, name) for name in names}
    return StoredBucket(_read_int(item, REFILLED_AT), _read_int(item, VERSION), limits)


def _read_limit(item: Item, name: str) -> StoredLimit:
    stored = StoredLimit(*(_read_int(item, name + attribute) for attribute in ATTRIBUTES))
    if stored.period_ms <= 0 or stored.amount < 0 or stored.capacity < 0:
        raise StoreMisconfigured(f"a bucket's limit {name} has numbers that no limit has; delete the item")
    return stored


def encode_stored_bucket(state: StoredBucket) -> dict[str, Value]:
    """What `state_of` reads."""
    attributes = {
        name + attribute: value
        for name, stored in state.limits.items()
        for attribute, value in zip(ATTRIBUTES, stored, strict=True)
    }
    return {REFILLED_AT: state.refilled_at, VERSION: state.version, **attributes}


def _read_int(item: Item, name: str) -> int:
    value = item.get(name)
    if type(value) is not int:
        raise StoreMisconfigured(f"a bucket's attribute {name} is missing or no whole number; delete the item")
    return value


def resolve_bucket(bucket: RateBucket, state: StoredBucket | None) -> RateBucket:
    """The settings to go by: those of the item where they are newer, a limit that they left out being no limit."""
    if state is None or state.version <= bucket.version:
        return bucket
    limits = (
        RateLimit(name, stored.capacity, stored.amount, stored.period_ms) for name, stored in state.limits.items()
    )
    return replace(bucket, limits=tuple(limits), version=state.version)


def get_refill_start(state: StoredBucket, now_ms: int) -> int:
    """Since when refill is due. Nobody's clock may be so far ahead: whoever wrote that was wrong, and it counts for
    nothing, or the bucket would not refill until its time has come."""
    return state.refilled_at if state.refilled_at <= now_ms + MAX_AHEAD_MS else now_ms


def compute_levels(state: StoredBucket, bucket: RateBucket, now_ms: int) -> dict[str, LimitLevel]:
    """Every limit in force. Time before a change of settings counts by the new ones: else a limit whose refill was
    nothing would refuse all, and as a refusal writes nothing, the new rate would never get into the item."""
    elapsed = max(0, now_ms - get_refill_start(state, now_ms))
    return {
        limit.name: _compute_level(limit, state.limits.get(limit.name), elapsed)
        for limit in resolve_bucket(bucket, state).limits
    }


def _compute_level(limit: RateLimit, stored: StoredLimit | None, elapsed: int) -> LimitLevel:
    if stored is None:  # new in the settings: it starts full
        return LimitLevel(limit.capacity, limit.capacity, 0, False)
    earned, remainder = _compute_refill(limit, stored, elapsed)
    if stored.tokens + earned < limit.capacity:
        return LimitLevel(stored.tokens + earned, earned, remainder, False)
    refill = limit.capacity - stored.tokens
    return LimitLevel(limit.capacity, refill, 0, refill != earned or remainder != 0)


def _compute_refill(limit: RateLimit, stored: StoredLimit, elapsed: int) -> tuple[int, int]:
    if limit.amount == 0:
        # What never refills is an amount to be used once: more of it is more to use, and less is less.
        return (limit.capacity - stored.capacity if stored.amount == 0 else 0), 0
    return divmod(elapsed * limit.amount + _carried_remainder(limit, stored), limit.period_ms)


def _carried_remainder(limit: RateLimit, stored: StoredLimit) -> int:
    """It is a part of the period: of another period it means nothing."""
    return stored.remainder if stored.period_ms == limit.period_ms else 0


def compute_available(state: StoredBucket, bucket: RateBucket, now_ms: int) -> dict[str, int]:
    """Tokens there now, by limit in force. Below zero where more was used than was taken."""
    return {name: level.tokens for name, level in compute_levels(state, bucket, now_ms).items()}


def compute_wait_ms(state: StoredBucket, bucket: RateBucket, costs: Mapping[str, int], now_ms: int) -> int | None:
    """Until `costs` would fit, if nobody else takes anything. None: never, by these settings."""
    longest = 0
    for limit in resolve_bucket(bucket, state).limits:
        cost = costs.get(limit.name, 0)
        wait = _compute_limit_wait(limit, state, cost, now_ms) if cost > 0 else 0
        if wait is None:
            return None
        longest = max(longest, wait)
    return longest


def _compute_limit_wait(limit: RateLimit, state: StoredBucket, cost: int, now_ms: int) -> int | None:
    stored = state.limits.get(limit.name)
    if cost > limit.capacity:
        return None
    if stored is None:
        return 0
    start = get_refill_start(state, now_ms)
    if _compute_level(limit, stored, max(0, now_ms - start)).tokens >= cost:
        return 0
    if limit.amount == 0:
        return None
    missing = (cost - stored.tokens) * limit.period_ms - _carried_remainder(limit, stored)
    return start - now_ms - (-missing // limit.amount)
