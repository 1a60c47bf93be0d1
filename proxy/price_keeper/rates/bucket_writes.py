"""The four conditional writes on a bucket, as values of the store's contract. Pure.

`taken` and `used` are in thousandths, by limit; names that the bucket does not have are ignored. `taken` lowers the
tokens in the bucket, `used` raises the counter of actual usage. Each write must be sent in a transaction with an
idempotency token. A condition covers exactly what the numbers in its write were computed from, so two writers conflict
only where one of them would write a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from price_keeper.rates.token_bucket import (
    AMOUNT,
    ATTRIBUTES,
    CAPACITY,
    CONSUMED,
    MAX_AHEAD_MS,
    PERIOD,
    REFILLED_AT,
    REMAINDER,
    TOKENS,
    VERSION,
    LimitLevel,
    RateBucket,
    RateLimit,
    StoredBucket,
    StoredLimit,
    compute_levels,
    get_refill_start,
    resolve_bucket,
)
from price_keeper.stores.contract import (
    EXPIRY_ATTRIBUTE,
    AttributeExists,
    AttributeMissing,
    Condition,
    ItemMissing,
    Put,
    Update,
    Value,
    all_of,
    at_least,
    at_most,
    equals,
)

# Taking without refill takes from the past: refill since then may already have been capped because of these tokens.
TAKE_ONLY_WINDOW_MS = 1_000

_DAY_SECONDS = 86_400

Amounts = Mapping[str, int]


def build_create(bucket: RateBucket, taken: Amounts, used: Amounts, now_ms: int) -> Put:
    """Create the item: a full bucket, less what is taken. The condition is that there is no item."""
    item: dict[str, Value] = {REFILLED_AT: now_ms, VERSION: bucket.version, **_expiry_attributes(bucket, now_ms)}
    for limit in bucket.limits:
        name = limit.name
        item |= _rate_attributes(limit)
        item[name + TOKENS] = min(limit.capacity, limit.capacity - taken.get(name, 0))
        item[name + CONSUMED] = used.get(name, 0)
        item[name + REMAINDER] = 0
    return Put(bucket.key, item, ItemMissing())


def build_refill_and_take(
    bucket: RateBucket,
    state: StoredBucket,
    taken: Amounts,
    used: Amounts,
    now_ms: int,
    *,
    is_exact: bool = True,
    may_overdraw: bool = False,
) -> Update:
    """Refill and take, if no process has refilled since `state` and there is enough. Newer settings go into the item.

    With `is_exact` False the condition also holds if others took from a full bucket in the meantime. Their part of the
    refill is lost then, so the limit is too strict by that much. `may_overdraw`: do not require that there is enough.
    """
    effective = resolve_bucket(bucket, state)
    refilled_at = max(get_refill_start(state, now_ms), now_ms)
    values: dict[str, Value] = {REFILLED_AT: refilled_at, **_expiry_attributes(bucket, now_ms)}
    added: dict[str, int] = {}
    conditions: list[Condition] = [equals(REFILLED_AT, state.refilled_at), equals(VERSION, state.version)]
    current = compute_levels(state, bucket, now_ms)
    for limit in effective.limits:
        name, stored, level = limit.name, state.limits.get(limit.name), current[limit.name]
        cost = max(taken.get(name, 0), level.tokens - limit.capacity)  # of tokens given back only what fits
        values[name + REMAINDER] = level.remainder
        added |= {name + TOKENS: level.refill - cost, name + CONSUMED: used.get(name, 0)}
        if stored is None or effective.version > state.version:
            values |= _rate_attributes(limit)
        conditions += _level_conditions(limit, stored, level, cost, is_exact=is_exact, may_overdraw=may_overdraw)
    values[VERSION] = effective.version
    dropped = (
        set(state.limits) - {limit.name for limit in effective.limits} if effective.version > state.version else ()
    )
    removed = tuple(name + attribute for name in sorted(dropped) for attribute in ATTRIBUTES)
    return Update(bucket.key, set=values, add=added, remove=removed, condition=all_of(*conditions))


def _level_conditions(
    limit: RateLimit, stored: StoredLimit | None, level: LimitLevel, cost: int, *, is_exact: bool, may_overdraw: bool
) -> Iterable[Condition]:
    """Yield what must hold of a limit's tokens for its computed level to be right, and sufficient."""
    tokens = limit.name + TOKENS
    if stored is None:
        yield AttributeMissing(tokens)
    elif level.is_capped and is_exact:
        yield equals(tokens, stored.tokens)
    else:
        rise = level.refill + max(0, -cost)
        if rise != 0 or limit.capacity < stored.capacity:
            yield at_most(tokens, limit.capacity - rise)
        if (cost > 0 or (level.is_capped and level.refill < 0)) and not may_overdraw:
            yield at_least(tokens, max(0, cost) - level.refill)


def build_take_only(
    bucket: RateBucket, taken: Amounts, used: Amounts, now_ms: int, least: Amounts | None = None
) -> Update:
    """Take without refill, whatever else the item holds, if a process refilled it within the last second.

    `bucket` must be as in force; the condition checks its version. `least`: what must be there, if more than is taken.
    """
    conditions: list[Condition] = [
        at_least(REFILLED_AT, now_ms - TAKE_ONLY_WINDOW_MS),
        at_most(REFILLED_AT, now_ms + MAX_AHEAD_MS),
        equals(VERSION, bucket.version),
    ]
    for limit in bucket.limits:
        required = max(taken.get(limit.name, 0), (least or {}).get(limit.name, 0))
        conditions.append(
            at_least(limit.name + TOKENS, required) if required > 0 else AttributeExists(limit.name + TOKENS)
        )
    add = _build_increments(bucket.limits, taken, used)
    return Update(bucket.key, set=_expiry_attributes(bucket, now_ms), add=add, condition=all_of(*conditions))


def build_adjustment(
    bucket: RateBucket, state: StoredBucket | None, taken: Amounts, used: Amounts, now_ms: int
) -> Update:
    """Take and give back without requiring that there is enough. Of tokens given back (negative) only what fits counts.

    Without `state` the write assumes an empty bucket with the settings of the item. A limit that the item does not
    have yet is added to it.
    """
    effective = resolve_bucket(bucket, state)
    changed = [limit for limit in effective.limits if taken.get(limit.name) or used.get(limit.name)]
    if state is not None and any(limit.name not in state.limits for limit in changed):
        return build_refill_and_take(bucket, state, taken, used, now_ms, may_overdraw=True)
    conditions: list[Condition] = [equals(VERSION, effective.version if state is None else state.version)]
    applied: dict[str, int] = {}
    for limit in changed:
        stored = state.limits[limit.name] if state is not None else None
        room = min(limit.capacity, stored.capacity) if stored is not None else limit.capacity
        tokens_now = stored.tokens if stored is not None else 0
        applied[limit.name] = cost = max(taken.get(limit.name, 0), min(0, tokens_now - room))
        tokens = limit.name + TOKENS
        conditions.append(at_most(tokens, room + cost) if cost < 0 else AttributeExists(tokens))
    add = _build_increments(changed, applied, used)
    return Update(bucket.key, set=_expiry_attributes(bucket, now_ms), add=add, condition=all_of(*conditions))


def _build_increments(limits: Sequence[RateLimit], taken: Amounts, used: Amounts) -> dict[str, int]:
    increments = {limit.name + TOKENS: -taken.get(limit.name, 0) for limit in limits}
    increments |= {limit.name + CONSUMED: used.get(limit.name, 0) for limit in limits}
    return {name: amount for name, amount in increments.items() if amount}


def _rate_attributes(limit: RateLimit) -> dict[str, Value]:
    return {
        limit.name + CAPACITY: limit.capacity,
        limit.name + AMOUNT: limit.amount,
        limit.name + PERIOD: limit.period_ms,
    }


def _expiry_attributes(bucket: RateBucket, now_ms: int) -> dict[str, Value]:
    """An expired item counts as a full bucket, so it expires when it is full; what never refills does not expire."""
    if bucket.expires_at is not None:
        return {EXPIRY_ATTRIBUTE: bucket.expires_at}
    if any(limit.amount == 0 for limit in bucket.limits):
        return {}
    longest_ms = max((limit.capacity * limit.period_ms // limit.amount for limit in bucket.limits), default=0)
    return {EXPIRY_ATTRIBUTE: (now_ms + longest_ms) // 1000 + _DAY_SECONDS}
