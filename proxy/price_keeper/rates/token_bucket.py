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

# How far a process's estimate of the store's time may be off, in either direction; two may differ by twice as much.
SKEW_MS: Final = 2_000
MAX_AHEAD_MS: Final = 2 * SKEW_MS

REFILLED_AT, VERSION = "rf", "v"
TOKENS, CONSUMED, REMAINDER, CAPACITY, AMOUNT, PERIOD = ATTRIBUTES = ("_tk", "_tc", "_rem", "_cp", "_ra", "_rp")


class RateLimit(NamedTuple):
    """`capacity` and `amount` in thousandths. A limit with an `amount` of 0 never refills."""

    name: str
    capacity: int
    amount: int
    period_ms: int


@dataclass(frozen=True, slots=True)
class RateBucket:
    """A bucket as the settings say. Without `expires_at` (epoch seconds) the item expires a day after its last write,
    or a day after it would be full again if that is later."""

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
    """The tokens of a limit now, and the `refill` that leads there, negative if the settings were lowered.

    `is_capped`: part of what was earned is above the capacity, so `refill` is right for this number of tokens alone.
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
        raise StoreMisconfigured(
            f"a rate limit bucket in the store has impossible numbers for its limit {name}; delete the item, "
            "and the bucket starts full"
        )
    return stored


def encode_stored_bucket(state: StoredBucket) -> dict[str, Value]:
    """The inverse of `parse_stored_bucket`."""
    attributes = {
        name + attribute: value
        for name, stored in state.limits.items()
        for attribute, value in zip(ATTRIBUTES, stored, strict=True)
    }
    return {REFILLED_AT: state.refilled_at, VERSION: state.version, **attributes}


def _read_int(item: Item, name: str) -> int:
    value = item.get(name)
    if type(value) is not int:
        raise StoreMisconfigured(
            f"attribute {name} of a rate limit bucket in the store is missing or not a whole number; delete the item, "
            "and the bucket starts full"
        )
    return value


def resolve_bucket(bucket: RateBucket, state: StoredBucket | None) -> RateBucket:
    """Return the settings that hold: those of the item if they are newer. A limit that these leave out is no limit."""
    if state is None or state.version <= bucket.version:
        return bucket
    limits = (
        RateLimit(name, stored.capacity, stored.amount, stored.period_ms) for name, stored in state.limits.items()
    )
    return replace(bucket, limits=tuple(limits), version=state.version)


def get_refill_start(state: StoredBucket, now_ms: int) -> int:
    """Return since when refill is due.

    A refill time too far in the future was written by a wrong clock. It is ignored, as otherwise the bucket would not
    refill until that time.
    """
    return state.refilled_at if state.refilled_at <= now_ms + MAX_AHEAD_MS else now_ms


def compute_levels(state: StoredBucket, bucket: RateBucket, now_ms: int) -> dict[str, LimitLevel]:
    """Return the level of every limit in force. Time before a change of settings counts at the new rates.

    Otherwise a limit whose refill was 0 would refuse all calls, and as a refusal writes nothing, the new rate would
    never get into the item.
    """
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
        # What never refills is a one-off amount: raising it adds tokens, and lowering it removes them.
        return (limit.capacity - stored.capacity if stored.amount == 0 else 0), 0
    return divmod(elapsed * limit.amount + _carried_remainder(limit, stored), limit.period_ms)


def _carried_remainder(limit: RateLimit, stored: StoredLimit) -> int:
    """The remainder is a fraction of the period, so with another period it means nothing."""
    return stored.remainder if stored.period_ms == limit.period_ms else 0


def compute_available(state: StoredBucket, bucket: RateBucket, now_ms: int) -> dict[str, int]:
    """Return the tokens there now, by limit in force. They are negative if more was used than was taken."""
    return {name: level.tokens for name, level in compute_levels(state, bucket, now_ms).items()}


def compute_wait_ms(state: StoredBucket, bucket: RateBucket, costs: Mapping[str, int], now_ms: int) -> int | None:
    """Return how long until `costs` would fit if no other process takes anything. None: never, by these settings."""
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
