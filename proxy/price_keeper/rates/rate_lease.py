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

# Results of `take`; a result above zero is a refusal and says how many milliseconds to wait.
TAKEN, TAKEN_BUT_LOW, NEEDS_TOP_UP = 0, -1, -2

MIN_HORIZON, MAX_HORIZON = 2.0, 30.0  # seconds of demand that a chunk covers
FIRST_HORIZON: Final = 8.0  # long enough that the top-ups of a fleet that starts at once do not overload the store
# Seconds between two top-ups while tokens are short; not longer, because small buckets soon overflow.
MIN_TOP_UP_INTERVAL: Final = 0.25
# A chunk covers this many calls, within the longest horizon: otherwise thin traffic would write for every call.
MIN_CALLS_PER_CHUNK: Final = 8
MIN_CALLS_IN_CHUNK: Final = 2  # a chunk covers at least these, within half of a bucket
LOW_SHARE: Final = 0.25  # of a chunk: a lease with less starts a top-up
LOW_WATER_LATENCIES: Final = 4  # store latencies that the rest of a lease must last for
# A chunk is at most a fourth of a bucket's capacity, so that a small bucket neither runs empty nor overflows.
CHUNKS_PER_BUCKET: Final = 4
MEMORY_SECONDS: Final = 5.0  # over which demand is averaged, or a horizon if that is longer
FOLD_SECONDS: Final = 0.5
IDLE_SECONDS = 5.0  # without a call, and IDLE_GAPS mean gaps between calls, until a lease is idle
IDLE_GAPS, MAX_IDLE_SECONDS = 5, 20.0
# After a top-up that conflicted the horizon is multiplied; after any other a little is added to the top-ups per second.
# Additive increase with multiplicative decrease brings all processes of a fleet to the same horizon, whatever their
# first one was.
CONFLICT_FACTOR, QUIET_STEP = 1.3, 0.01
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 8.0  # seconds after a top-up that failed by conflicts; doubled after each further one
SLOW_ANSWER_SECONDS: Final = 0.08  # a response this late was retried below this layer because of a conflict
# A response this late was retried several times: the store has more to do than it can.
OVERLOAD_FACTOR, OVERLOADED_ANSWER_SECONDS = 2.0, 0.4
# The most that a refused call is told to wait beyond the next top-up; a longer estimate would be a guess.
MAX_EXTRA_WAIT_SECONDS: Final = 15.0
# A bucket that was full for long may be used up at once, by halves. Rationing begins after BURST_SECONDS of that, or
# when a top-up gets no more than 1/BURST_SHARE of what it wanted. It ends when there was enough for BURST_AFTER
# seconds, which is longer than any horizon.
BURST_SECONDS, BURST_SHARE, BURST_AFTER = 1.0, 8, 40.0

# The fair rate is a function of how full a bucket is, the same one for every sidecar. At `BRIM_SECONDS` of refill (or
# `BRIM_SHARE` of a smaller bucket) a sidecar may take all of the refill, and below that its part falls steeply. So the
# level for a fleet of a thousand settles at a tenth of that, and not near zero, where luck would decide who gets some.
BRIM_SECONDS, BRIM_SHARE, STEEPNESS = 6.0, 0.75, 3
SHARE_UNIT: Final = 10**9
LEVEL_WEIGHT: Final = 0.2  # of the newest level in the mean
FALLEN_LEVEL_WEIGHT: Final = 0.7  # of a level below half of the mean: a burst is over
SLACK: Final = 1.5  # how far the level may have fallen while taking all that is wanted still counts as fair
LEVEL_TTL_SECONDS: Final = 60.0  # after which an old level does not count
LEVEL_HORIZONS: Final = 3  # after which the level must be seen again


class TopUpPlan(NamedTuple):
    """What to ask the store for: the arguments of `BucketClient.lease`."""

    wants: dict[str, int]
    needs: dict[str, int]
    used: dict[str, int]
    share: tuple[int, int]
    enough_share: float  # part of the wants; after a grant of less, the next top-up waits for an interval


def select_slowest_refill(buckets: Sequence[RateBucket]) -> dict[str, RateLimit]:
    """Return for each limit the level that refills slowest: it runs dry first."""
    slowest: dict[str, RateLimit] = {}
    for bucket in buckets:
        for limit in bucket.limits:
            other = slowest.get(limit.name)
            if other is None or limit.amount * other.period_ms < other.amount * limit.period_ms:
                slowest[limit.name] = limit
    return slowest


class RateLease:
    """One caller's tokens in this process: what is held, the demand, and when to top up."""

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
        """`random_fraction` returns a number in [0, 1), so that the processes of a fleet do not run in step."""
        self._random = random_fraction
        self.horizon = FIRST_HORIZON
        self.not_before = 0.0  # while tokens are short, no top-up before this time
        self.last_call = now
        self._started_at = self._folded_at = now - 1.0  # as if the first call ended a second of traffic
        self._renewed_at = self._level_at = self._burst_at = self._rationed_at = -inf
        self._requested_at = now
        self._latency = 0.02
        self._backoffs = 0
        self._retry_period = MIN_HORIZON  # the top-up interval when calls were last refused
        self.names: tuple[str, ...] = ()
        self.held: list[int] = []
        self.used: list[int] = []  # not reported to the store yet
        self._demand: list[float] = []  # a second; the last entry counts calls
        self._offered: list[int] = []  # demand since the last fold
        self._grant_rate: list[float] = []  # a second, as the store has recently granted
        self._bucket_remaining: list[int] = []  # in the bucket, as last seen
        self._mean_level: list[float] = []  # of the bucket, averaged over what was seen
        self._promised: list[int] = []  # to refused calls that were given a time to come back
        self.apply_buckets(buckets)

    def apply_buckets(self, buckets: Sequence[RateBucket]) -> None:
        """Apply the current settings. Held tokens stay, up to the capacity."""
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
        self._grant_rate = list(self._refill_rate)  # until shown otherwise, this process may be the only one
        self._mean_level = [float(most) for most in self._capacity]
        self._bucket_remaining = list(self._capacity)
        self._level_at = -inf
        self._promised = [0] * len(limits)
        self._low_water = [0] * len(limits)
        self.not_before = 0.0  # the new settings may allow more

    # For calls.

    def take(self, costs: Costs, now: float, is_counted: bool = False) -> int:
        """Count the call as demand, unless it is counted, and take its costs: all of them, or nothing. Returns TAKEN,
        TAKEN_BUT_LOW, NEEDS_TOP_UP, or the milliseconds to wait."""
        if not is_counted:
            self.last_call = now
            offered = self._offered
            offered[-1] += 1
            for place, cost in enumerate(costs):
                offered[place] += cost
            if now - self._folded_at >= FOLD_SECONDS:
                self._fold_demand(now)
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
        """Estimate when this call would find enough: at the next top-up, or later if refused calls were promised it."""
        period, periods = self._retry_period, 0
        for place, cost in enumerate(costs):
            self._promised[place] += cost
            per_period = self._grant_rate[place] * period
            if cost and per_period > 0:
                periods = max(periods, int(self._promised[place] / max(per_period, cost)))
        wait = max(0.0, self.not_before - now) + min(periods * period, MAX_EXTRA_WAIT_SECONDS) + self._latency
        return max(1, round(wait * 1000))

    def settle(self, estimate: Costs, actual: Costs) -> None:
        """Replace the estimate of a call by its actual usage. `held` may get negative: the next top-up pays that."""
        held, used = self.held, self.used
        for place, used_now in enumerate(actual):
            held[place] += estimate[place] - used_now
            used[place] += used_now

    # For top-ups.

    def plan_top_up(self, now: float, need: Costs | None = None) -> TopUpPlan:
        """Compute what to ask for. `need`: of a call that waits. One of the `on_...` methods must get the result."""
        self._fold_demand(now)
        self._requested_at = now
        wants, needs = {}, {}
        for place, name in enumerate(self.names):
            overdrawn = max(0, -self.held[place])
            least = need[place] if need is not None else self._mean_cost(place)
            recent_demand = min(self._offered[place], self._capacity[place] // 2)  # many calls at the same moment
            target = max(self._chunk_size(place), least, recent_demand)
            wants[name] = max(0, target - self.held[place])
            needs[name] = min(wants[name], least + overdrawn if least > self.held[place] else 0)
        used = dict(zip(self.names, self.used, strict=True))
        self.used = [0] * len(self.names)
        is_informed = now - self._level_at < LEVEL_HORIZONS * self.horizon
        share, is_rationed = self._fair_share(wants, now, is_informed)
        is_crowded = self.horizon > FIRST_HORIZON  # if many processes took halves at once, they would conflict
        is_burst = is_rationed and not is_crowded and self._is_burst(now)
        enough = 1.0 if is_crowded or (is_rationed and not is_burst) else 1 / BURST_SHARE
        if not is_informed:
            enough = 0.0  # the bucket may hold more than was estimated
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
        """Add granted tokens. `is_level_exact`: `remaining` was just read; otherwise it is an upper bound, as others
        may have taken tokens since."""
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
        """Record a top-up that took nothing, because the bucket has not enough or others were faster each time."""
        if all(remaining.get(name, need) >= need for name, need in plan.needs.items()):
            self.on_failed(plan, now, had_conflicts=True)  # there is enough, but others were faster each time
            return
        self._restore_used(plan)
        self._record_levels(remaining, {}, now, True)
        self._adapt_horizon(False, now)
        self._burst_at, self._rationed_at = -inf, now
        self._schedule_top_up(now, True)
        self.not_before = max(self.not_before, now + min((wait_ms or 0) / 1000, MAX_HORIZON))

    def on_failed(self, plan: TopUpPlan, now: float, *, had_conflicts: bool) -> None:
        """Record a top-up that took nothing and reported no usage, and back off if conflicts were the reason."""
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
        """Return the debt (negative) if a bucket hardly ever holds enough for it and the next call; otherwise None."""
        for place, held in enumerate(self.held):
            least = need[place] if need is not None else self._mean_cost(place)
            if held < 0 and 2 * (least - held) > self._capacity[place]:
                return tuple([min(0, amount) for amount in self.held])
        return None

    # For idle callers and shutdown.

    def is_idle(self, now: float) -> bool:
        calls = self._demand[-1]
        gaps = IDLE_GAPS / calls if calls > 0 else inf
        return now - self.last_call >= max(IDLE_SECONDS, min(gaps, MAX_IDLE_SECONDS))

    def find_surplus(self, now: float) -> Costs:
        """Return what is held above the chunk size, where more than two chunks are left from busier times."""
        self._fold_demand(now)
        targets = ((held, self._chunk_size(place)) for place, held in enumerate(self.held))
        return tuple(held - target if held > 2 * target else 0 for held, target in targets)

    def take_out(self, amounts: Costs | None = None) -> tuple[dict[str, int], dict[str, int]]:
        """Remove `amounts` (by default everything held; negative for a debt) and all unreported usage, and return
        both."""
        returned = dict(zip(self.names, self.held if amounts is None else amounts, strict=True))
        used = dict(zip(self.names, self.used, strict=True))
        self.held = [held - returned[name] for name, held in zip(self.names, self.held, strict=True)]
        self.used = [0] * len(self.names)
        return returned, used

    def estimate_remaining(self) -> list[tuple[str, int]]:
        """Return what is held plus what the bucket had when it was last seen, by limit."""
        remaining, held, in_bucket, capacity = [], self.held, self._bucket_remaining, self._capacity
        for place, name in enumerate(self.names):
            full, amount = capacity[place], held[place] + in_bucket[place]
            remaining.append((name, amount if amount < full else full))
        return remaining

    @property
    def is_empty(self) -> bool:
        return not any(self.held) and not any(self.used)

    # Estimates of demand, chunk size and fair share.

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
        """Return how many seconds of demand a chunk covers."""
        calls = self._demand[-1]
        return min(MAX_HORIZON, max(self.horizon, MIN_CALLS_PER_CHUNK / calls if calls > 0 else 0.0))

    def _chunk_size(self, place: int) -> int:
        capacity = self._capacity[place]
        chunk = min(self._demand[place] * self._chunk_seconds(), capacity / CHUNKS_PER_BUCKET)
        return round(max(chunk, min(MIN_CALLS_IN_CHUNK * self._mean_cost(place), capacity / 2)))

    def _top_up_interval(self) -> float:
        """Return the seconds between two top-ups while tokens are short: the bucket must not overflow in between."""
        rates = zip(self._capacity, self._grant_rate, strict=True)
        soonest = min((most / CHUNKS_PER_BUCKET / gain for most, gain in rates if gain > 0), default=inf)
        return max(MIN_TOP_UP_INTERVAL, min(self._chunk_seconds(), soonest))

    def _is_burst(self, now: float) -> bool:
        if now - self._rationed_at > BURST_AFTER:
            self._burst_at = now
        self._rationed_at = now
        return now - self._burst_at < BURST_SECONDS

    def _fair_share(self, wants: Mapping[str, int], now: float, is_informed: bool) -> tuple[tuple[int, int], bool]:
        """Return the largest fair part of the bucket, at most a half, and whether it is less than what is wanted."""
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
