"""The tokens that one process holds of a caller's buckets, and how many more to ask for. Pure: time and randomness are
passed in.

All limits of a caller are one vector, in the order of `names`, in thousandths. A lease never talks to the store:
`take` says when to top up, `plan_top_up` says how much to ask for, and `on_granted`, `on_refused` or `on_failed` must
be called with the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple, TypeAlias

from price_keeper.rates.token_bucket import RateBucket, RateLimit

Costs: TypeAlias = tuple[int, ...]

# What `take` answers; above zero: refused, and how many milliseconds to wait.
TAKEN, TAKEN_BUT_LOW, NEEDS_TOP_UP = 0, -1, -2

MIN_HORIZON, MAX_HORIZON = 2.0, 30.0  # seconds that a chunk is for
FIRST_HORIZON: Final = 8.0  # a fleet that starts at once must not find the store busy with itself
MIN_TOP_UP_INTERVAL: Final = (
    0.25  # seconds between two questions where there is not enough: small buckets overflow soon
)
MIN_CALLS_PER_CHUNK: Final = (
    8  # a chunk is for so many, within the longest horizon: else thin traffic would write for every call
)
MIN_CALLS_IN_CHUNK: Final = 2  # in a chunk even so, within half of a bucket
LOW_SHARE: Final = 0.25  # of a chunk: when less is left, more is asked for
LOW_WATER_LATENCIES: Final = 4  # of the store, that what is left must last for
CHUNKS_PER_BUCKET: Final = (
    4  # a fourth of its capacity in a chunk at most, so that a small one does not run empty or over
)
MEMORY_SECONDS: Final = 5.0  # of the mean demand, or a horizon if that is longer
FOLD_SECONDS: Final = 0.5
IDLE_SECONDS = 5.0  # without a call, and so many mean gaps between calls
IDLE_GAPS, MAX_IDLE_SECONDS = 5, 20.0
# The horizon after a question that others were in the way of; after any other, a little is added to the questions a
# second. Adding and dividing is what brings all of a fleet to the same horizon, whatever each began with.
CONFLICT_FACTOR, QUIET_STEP = 1.3, 0.01
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 8.0  # seconds after a question that others made fail: twice as long after the next
SLOW_ANSWER_SECONDS: Final = 0.08  # an answer as late as that had others in its way, and was sent again below us
OVERLOAD_FACTOR, OVERLOADED_ANSWER_SECONDS = (
    2.0,
    0.4,
)  # where that happened several times: the store has more to do than it can
MAX_EXTRA_WAIT_SECONDS: Final = (
    15.0  # seconds that somebody is told to wait after more is asked for: longer is anybody's guess
)
# A bucket that was full for long may be used up at once, by halves: fairness begins when that was tried for so long, or
# brought no more than an eighth of what was wanted. Then it lasts until there was enough for longer than any horizon.
BURST_SECONDS, BURST_SHARE, BURST_AFTER = 1.0, 8, 40.0

# The fair rate as a function of how full a bucket is, the same one for every sidecar: at `BRIM_SECONDS` of refill
# (or `BRIM_SHARE` of a smaller bucket) one may have all of the refill, and below that it falls steeply: so a fleet of a
# thousand settles at a tenth of that, and not at next to nothing where it would be luck who finds some.
BRIM_SECONDS, BRIM_SHARE, STEEPNESS = 6.0, 0.75, 3
SHARE_UNIT: Final = 10**9
LEVEL_WEIGHT: Final = 0.2  # of the newest level in the mean
FALLEN_LEVEL_WEIGHT: Final = 0.7  # of one that is less than half of it: a burst is over
SLACK: Final = 1.5  # how far the level may have fallen for as much as is wanted to be fair still
LEVEL_TTL_SECONDS: Final = 60.0  # after which what was seen is worth nothing
LEVEL_HORIZONS: Final = 3  # after which it is looked at again


class TopUpPlan(NamedTuple):
    """What to ask the store for: the arguments of `Limiter.lease`."""

    wants: dict[str, int]
    needs: dict[str, int]
    used: dict[str, int]
    share: tuple[int, int]
    enough_share: float  # part of the wants: who gets less than that waits for a horizon


def select_slowest_refill(buckets: Sequence[RateBucket]) -> dict[str, RateLimit]:
    """Of each limit the one that refills slowest, over all levels: it is what runs dry first."""
    found: dict[str, RateLimit] = {}
    for bucket in buckets:
        for limit in bucket.limits:
            other = found.get(limit.name)
            if other is None or limit.amount * other.period_ms < other.amount * limit.period_ms:
                found[limit.name] = limit
    return found


class RateLease:
    __slots__ = (
        "_backoffs",
        "_bucket_remaining",
        "_burst_at",
        "_capacity",
        "_demand",
        "_folded_at",
        "_grant_rate",
        "_latency",
        "_level_at",
        "_low_water",
        "_mean_level",
        "_offered",
        "_promised",
        "_random",
        "_rationed_at",
        "_refill_rate",
        "_renewed_at",
        "_requested_at",
        "_retry_period",
        "_started_at",
        "held",
        "horizon",
        "last_call",
        "names",
        "not_before",
        "used",
    )  # fmt: skip

    def __init__(self, buckets: Sequence[RateBucket], now: float, random_fraction: Callable[[], float]) -> None:
        """`chance` gives a number in [0, 1): so that a fleet does not come in step."""
        self._random = random_fraction
        self.horizon = FIRST_HORIZON
        self.not_before = 0.0  # where there is not enough: until then nobody is asked
        self.last_call = now
        self._started_at = self._folded_at = now - 1.0  # as if the first call were the first of a second
        self._renewed_at = self._level_at = self._burst_at = self._rationed_at = -inf
        self._requested_at = now
        self._latency = 0.02
        self._backoffs = 0
        self._retry_period = MIN_HORIZON  # as it was when somebody was told to wait
        self.names: tuple[str, ...] = ()
        self.held: list[int] = []
        self.used: list[int] = []  # and not told yet
        self._demand: list[float] = []  # a second; the last one counts calls
        self._offered: list[int] = []  # since the last fold
        self._grant_rate: list[float] = []  # a second, as the store has given of late
        self._bucket_remaining: list[int] = []  # in the bucket, as last seen
        self._mean_level: list[float] = []  # of the bucket, as found on average
        self._promised: list[int] = []  # to those who were told to come back
        self.apply_buckets(buckets)

    def apply_buckets(self, buckets: Sequence[RateBucket]) -> None:
        """The settings as they are now. What is held stays, up to the capacity."""
        limits, old_names = select_slowest_refill(buckets), self.names
        old_places = [old_names.index(name) if name in old_names else None for name in limits]
        capacity: dict[str, int] = {}
        for bucket in buckets:
            for limit in bucket.limits:
                capacity[limit.name] = min(limit.capacity, capacity.get(limit.name, limit.capacity))
        self.names = tuple(limits)
        self._capacity = [capacity[name] for name in limits]
        self._refill_rate = [limit.amount * 1000 / limit.period_ms for limit in limits.values()]
        old_held = [0 if place is None else self.held[place] for place in old_places]
        self.held = [min(amount, most) for amount, most in zip(old_held, self._capacity, strict=True)]
        self.used = [0 if place is None else self.used[place] for place in old_places]
        calls = (self._demand[-1], self._offered[-1]) if self._demand else (0.0, 0)
        self._demand = [0.0 if place is None else self._demand[place] for place in old_places] + [calls[0]]
        self._offered = [0 if place is None else self._offered[place] for place in old_places] + [calls[1]]
        self._grant_rate = list(self._refill_rate)  # it may be alone
        self._mean_level = [float(most) for most in self._capacity]
        self._bucket_remaining = list(self._capacity)
        self._level_at = -inf
        self._promised = [0] * len(limits)
        self._low_water = [0] * len(limits)
        self.not_before = 0.0  # there may be more now

    # For the calls.

    def take(self, costs: Costs, now: float) -> int:
        self.last_call = now
        offered = self._offered
        offered[-1] += 1
        for place, cost in enumerate(costs):
            offered[place] += cost
        if now - self._folded_at >= FOLD_SECONDS:
            self._fold_demand(now)
        return self.retake(costs, now)

    def retake(self, costs: Costs, now: float) -> int:
        """For a call that has been counted as demand."""
        held, low, answer = self.held, self._low_water, TAKEN
        for place, cost in enumerate(costs):
            if cost > held[place] and cost:
                return NEEDS_TOP_UP if now >= self.not_before else self.estimate_wait_ms(costs, now)
        for place, cost in enumerate(costs):
            held[place] = remaining = held[place] - cost
            if remaining < low[place] and cost:
                answer = TAKEN_BUT_LOW
        return TAKEN if now < self.not_before else answer

    def exceeds_capacity(self, costs: Costs) -> bool:
        return any(cost > most for cost, most in zip(costs, self._capacity, strict=True))

    def estimate_wait_ms(self, costs: Costs, now: float) -> int:
        """Until this call would find enough: when more is asked for, or later if others were told to come then."""
        period, periods = self._retry_period, 0
        for place, cost in enumerate(costs):
            self._promised[place] += cost
            per_period = self._grant_rate[place] * period
            if cost and per_period > 0:
                periods = max(periods, int(self._promised[place] / max(per_period, cost)))
        wait = max(0.0, self.not_before - now) + min(periods * period, MAX_EXTRA_WAIT_SECONDS) + self._latency
        return max(1, round(wait * 1000))

    def settle(self, estimate: Costs, actual: Costs) -> None:
        """What was taken for a call is no more held back for it. Below zero is what is owed: the next top-up pays."""
        held, used = self.held, self.used
        for place, used_now in enumerate(actual):
            held[place] += estimate[place] - used_now
            used[place] += used_now

    # For who asks the store.

    def plan_top_up(self, now: float, need: Costs | None = None) -> TopUpPlan:
        """`need`: of a call that waits for it. Who asked must say what came of it."""
        self._fold_demand(now)
        self._requested_at = now
        wants, needs = {}, {}
        for place, name in enumerate(self.names):
            overdrawn = max(0, -self.held[place])
            least = need[place] if need is not None else self._mean_cost(place)
            recent_demand = min(self._offered[place], self._capacity[place] // 2)  # many calls in one moment
            target = max(self._chunk_size(place), least, recent_demand)
            wants[name] = max(0, target - self.held[place])
            needs[name] = min(wants[name], least + overdrawn if least > self.held[place] else 0)
        used = dict(zip(self.names, self.used, strict=True))
        self.used = [0] * len(self.names)
        is_informed = now - self._level_at < LEVEL_HORIZONS * self.horizon
        share, is_rationed = self._fair_share(wants, now, is_informed)
        is_crowded = self.horizon > FIRST_HORIZON  # many halves asked for at once would be in each other's way
        is_burst = is_rationed and not is_crowded and self._is_burst(now)
        enough = 1.0 if is_crowded or (is_rationed and not is_burst) else 1 / BURST_SHARE
        if not is_informed:
            enough = 0.0  # there may be more than was thought
        return TopUpPlan(wants, needs, used, (1, 2) if is_burst else share, enough)

    def on_granted(
        self,
        plan: TopUpPlan,
        taken: Mapping[str, int],
        remaining: Mapping[str, int],
        now: float,
        *,
        is_level_exact: bool = True,
        had_conflicts: bool = False,
    ) -> None:
        """`is_seen`: what is left is as it was just seen, else it is that at most: others may have taken of it."""
        elapsed = max(now - self._renewed_at, MIN_TOP_UP_INTERVAL) if self._renewed_at > 0 else self._top_up_interval()
        self._renewed_at = now
        is_short = False
        for place, name in enumerate(self.names):
            got, want = taken.get(name, 0), plan.wants.get(name, 0)
            self.held[place] += got
            is_short |= got < want * plan.enough_share
            gain = min(got / elapsed, self._refill_rate[place]) if self._refill_rate[place] > 0 else got / elapsed
            self._grant_rate[place] += (gain - self._grant_rate[place]) * min(1.0, elapsed / (2 * self.horizon))
        self._record_levels(remaining, taken, now, is_level_exact)
        self._adapt_horizon(had_conflicts, now)
        self._backoffs = 0
        self._schedule_top_up(now, is_short)
        self._update_low_water()

    def on_refused(self, plan: TopUpPlan, wait_ms: int | None, remaining: Mapping[str, int], now: float) -> None:
        if all(remaining.get(name, need) >= need for name, need in plan.needs.items()):
            self.on_failed(plan, now, had_conflicts=True)  # there is enough: others were faster each time
            return
        self._restore_used(plan)
        self._record_levels(remaining, {}, now, True)
        self._adapt_horizon(False, now)
        self._burst_at, self._rationed_at = -inf, now
        self._schedule_top_up(now, True)
        self.not_before = max(self.not_before, now + min((wait_ms or 0) / 1000, MAX_HORIZON))

    def on_failed(self, plan: TopUpPlan, now: float, *, had_conflicts: bool) -> None:
        """Nothing was taken, nothing told."""
        self._restore_used(plan)
        if had_conflicts:
            self._adapt_horizon(True, now)
            pause = min(MAX_BACKOFF, max(self._latency, FIRST_BACKOFF * 2**self._backoffs))
            self._backoffs = min(self._backoffs + 1, 10)
            self.not_before = now + pause * (0.5 + self._random())

    def _restore_used(self, plan: TopUpPlan) -> None:
        for place, name in enumerate(self.names):
            self.used[place] += plan.used.get(name, 0)

    def _record_levels(
        self, remaining: Mapping[str, int], taken: Mapping[str, int], now: float, is_exact: bool
    ) -> None:
        weight = max(LEVEL_WEIGHT, min(1.0, (now - self._level_at) / LEVEL_TTL_SECONDS))
        for place, name in enumerate(self.names):
            level = max(0, remaining.get(name, 0) + taken.get(name, 0))
            before = self._mean_level[place]
            self._bucket_remaining[place] = remaining.get(name, self._bucket_remaining[place])
            if name in remaining and (is_exact or level < before):
                has_sunk = level < before / 2
                self._mean_level[place] += (level - before) * (max(weight, FALLEN_LEVEL_WEIGHT) if has_sunk else weight)
        if is_exact:
            self._level_at = now

    def _adapt_horizon(self, had_conflicts: bool, now: float) -> None:
        self._latency = now - self._requested_at
        if self._latency > OVERLOADED_ANSWER_SECONDS:
            self.horizon *= OVERLOAD_FACTOR
        elif had_conflicts or self._latency > SLOW_ANSWER_SECONDS:
            self.horizon *= CONFLICT_FACTOR
        else:
            self.horizon = 1 / (1 / self.horizon + QUIET_STEP)
        self.horizon = min(MAX_HORIZON, max(MIN_HORIZON, self.horizon))

    def _schedule_top_up(self, now: float, is_short: bool) -> None:
        self._retry_period = period = self._top_up_interval()
        self.not_before = now + period * (0.85 + 0.3 * self._random()) if is_short else 0.0
        for place, gain in enumerate(self._grant_rate):
            self._promised[place] = max(0, self._promised[place] - int(gain * period)) if is_short else 0

    def find_unpayable_debt(self, need: Costs | None = None) -> Costs | None:
        """What is owed, below zero, where a bucket hardly ever has as much at once as that and the next call take."""
        for place, held in enumerate(self.held):
            least = need[place] if need is not None else self._mean_cost(place)
            if held < 0 and 2 * (least - held) > self._capacity[place]:
                return tuple([min(0, each) for each in self.held])
        return None

    # When nobody calls.

    def is_idle(self, now: float) -> bool:
        calls = self._demand[-1]
        gaps = IDLE_GAPS / calls if calls > 0 else inf
        return now - self.last_call >= max(IDLE_SECONDS, min(gaps, MAX_IDLE_SECONDS))

    def find_surplus(self, now: float) -> Costs:
        """Held from busier times: what is above two chunks."""
        self._fold_demand(now)
        targets = ((held, self._chunk_size(place)) for place, held in enumerate(self.held))
        return tuple(held - target if held > 2 * target else 0 for held, target in targets)

    def take_out(self, amounts: Costs | None = None) -> tuple[dict[str, int], dict[str, int]]:
        """What goes back, all unless it is said how much (below zero where it owes), and what was used."""
        returned = dict(zip(self.names, self.held if amounts is None else amounts, strict=True))
        used = dict(zip(self.names, self.used, strict=True))
        self.held = [held - returned[name] for name, held in zip(self.names, self.held, strict=True)]
        self.used = [0] * len(self.names)
        return returned, used

    def estimate_remaining(self) -> list[tuple[str, int]]:
        """What is held, and what the bucket had when it was last seen; by limit."""
        remaining, held, left, capacity = [], self.held, self._bucket_remaining, self._capacity
        for place, name in enumerate(self.names):
            full, amount = capacity[place], held[place] + left[place]
            remaining.append((name, amount if amount < full else full))
        return remaining

    @property
    def is_empty(self) -> bool:
        return not any(self.held) and not any(self.used)

    # How much.

    def _fold_demand(self, now: float) -> None:
        passed = now - self._folded_at
        if passed < FOLD_SECONDS / 5:
            return
        memory = max(MEMORY_SECONDS, self.horizon)
        weight = min(1.0, passed / min(max(now - self._started_at, passed), memory))
        for place, offered in enumerate(self._offered):
            self._demand[place] += (offered / passed - self._demand[place]) * weight
            self._offered[place] = 0
        self._folded_at = now
        self._update_low_water()

    def _update_low_water(self) -> None:
        for place in range(len(self.names)):
            latency_reserve = self._demand[place] * LOW_WATER_LATENCIES * self._latency
            low = max(LOW_SHARE * self._chunk_size(place), latency_reserve, self._mean_cost(place))
            self._low_water[place] = int(min(low, 0.75 * self._chunk_size(place)))

    def _mean_cost(self, place: int) -> int:
        calls = self._demand[-1]
        return round(self._demand[place] / calls) if calls > 0 else 0

    def _chunk_seconds(self) -> float:
        """That a chunk is for."""
        calls = self._demand[-1]
        return min(MAX_HORIZON, max(self.horizon, MIN_CALLS_PER_CHUNK / calls if calls > 0 else 0.0))

    def _chunk_size(self, place: int) -> int:
        capacity = self._capacity[place]
        chunk = min(self._demand[place] * self._chunk_seconds(), capacity / CHUNKS_PER_BUCKET)
        return round(max(chunk, min(MIN_CALLS_IN_CHUNK * self._mean_cost(place), capacity / 2)))

    def _top_up_interval(self) -> float:
        """Seconds between two questions where there is not enough: a bucket must not run over in between."""
        rates = zip(self._capacity, self._grant_rate, strict=True)
        soonest = min((most / CHUNKS_PER_BUCKET / gain for most, gain in rates if gain > 0), default=inf)
        return max(MIN_TOP_UP_INTERVAL, min(self._chunk_seconds(), soonest))

    def _is_burst(self, now: float) -> bool:
        if now - self._rationed_at > BURST_AFTER:
            self._burst_at = now
        self._rationed_at = now
        return now - self._burst_at < BURST_SECONDS

    def _fair_share(self, wants: Mapping[str, int], now: float, is_informed: bool) -> tuple[tuple[int, int], bool]:
        """Of what is there, at most, never more than a half; and whether that is less than wanted, for being fair."""
        period = self._top_up_interval()
        elapsed = min(max(now - self._renewed_at, period / 2), 2 * period)
        fair, enough, is_rationed = 0.5, 0.0, False
        for place, name in enumerate(self.names):
            rate, level = (
                self._refill_rate[place],
                max(1.0, self._mean_level[place] if is_informed else self._capacity[place]),
            )
            if rate <= 0:
                enough = 0.5
                continue
            brim = min(self._capacity[place] * BRIM_SHARE, BRIM_SECONDS * rate)
            part = elapsed * rate / brim * (level / brim) ** (STEEPNESS - 1)
            enough = max(enough, SLACK * wants[name] / level)
            if wants[name] > part * level:
                fair, is_rationed = min(fair, part), True
        return (max(1, round(min(fair, enough) * SHARE_UNIT)), SHARE_UNIT), is_rationed
