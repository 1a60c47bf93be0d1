"""What one sidecar holds of a caller's buckets, and how much it asks for. Pure: the time and the dice are handed in.

All limits of a caller are one vector, in the order of `names`; amounts are in thousandths. A lease never asks the store
itself: `take` says when to, `plan` what to ask for, `renewed` and its sisters are told what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final, NamedTuple, TypeAlias

from price_keeper.limits.bucket import RateBucket, RateLimit

Costs: TypeAlias = tuple[int, ...]

# What `take` answers; above zero: refused, and how many milliseconds to wait.
TAKEN, TAKEN_BUT_LOW, ASK = 0, -1, -2

LEAST_HORIZON, MOST_HORIZON = 2.0, 30.0  # seconds that a chunk is for
FIRST_HORIZON: Final = 8.0  # a fleet that starts at once must not find the store busy with itself
LEAST_RENEWAL: Final = 0.25  # seconds between two questions where there is not enough: small buckets overflow soon
FEW_CALLS: Final = 8  # a chunk is for so many, within the longest horizon: else thin traffic would write for every call
LEAST_CALLS: Final = 2  # in a chunk even so, within half of a bucket
LOW_SHARE: Final = 0.25  # of a chunk: when less is left, more is asked for
LATENCIES: Final = 4  # of the store, that what is left must last for
MOST_OF_BUCKET: Final = 4  # a fourth of its capacity in a chunk at most, so that a small one does not run empty or over
MEMORY_SECONDS: Final = 5.0  # of the mean demand, or a horizon if that is longer
FOLD_SECONDS: Final = 0.5
IDLE_SECONDS = 5.0  # without a call, and so many mean gaps between calls
IDLE_GAPS, MOST_IDLE_SECONDS = 5, 20.0
# The horizon after a question that others were in the way of; after any other, a little is added to the questions a
# second. Adding and dividing is what brings all of a fleet to the same horizon, whatever each began with.
LONGER, MORE_A_SECOND = 1.3, 0.01
FIRST_PAUSE, MOST_PAUSE = 0.5, 8.0  # seconds after a question that others made fail: twice as long after the next
SLOW_SECONDS: Final = 0.08  # an answer as late as that had others in its way, and was sent again below us
FAR_LONGER, TOO_SLOW_SECONDS = 2.0, 0.4  # where that happened several times: the store has more to do than it can
MOST_TOLD: Final = 15.0  # seconds that somebody is told to wait after more is asked for: longer is anybody's guess
# A bucket that was full for long may be used up at once, by halves: fairness begins when that was tried for so long, or
# brought no more than an eighth of what was wanted. Then it lasts until there was enough for longer than any horizon.
BURST_SECONDS, BURST_SHARE, BURST_AFTER = 1.0, 8, 40.0

# The fair rate as a function of how full a bucket is, the same one for every sidecar: at `BRIM_SECONDS` of refill
# (or `BRIM_SHARE` of a smaller bucket) one may have all of the refill, and below that it falls steeply: so a fleet of a
# thousand settles at a tenth of that, and not at next to nothing where it would be luck who finds some.
BRIM_SECONDS, BRIM_SHARE, STEEPNESS = 6.0, 0.75, 3
SHARE_UNIT: Final = 10**9
LEVEL_WEIGHT: Final = 0.2  # of the newest level in the mean
SUNK_WEIGHT: Final = 0.7  # of one that is less than half of it: a burst is over
SLACK: Final = 1.5  # how far the level may have fallen for as much as is wanted to be fair still
LEVEL_SECONDS: Final = 60.0  # after which what was seen is worth nothing
LEVEL_HORIZONS: Final = 3  # after which it is looked at again


class Plan(NamedTuple):
    """What to ask the store for: the arguments of `Limiter.lease`."""

    wants: dict[str, int]
    needs: dict[str, int]
    used: dict[str, int]
    share: tuple[int, int]
    content: float  # part of the wants: who gets less than that waits for a horizon


def tightest(buckets: Sequence[RateBucket]) -> dict[str, RateLimit]:
    """Of each limit the one that refills slowest, over all levels: it is what runs dry first."""
    found: dict[str, RateLimit] = {}
    for bucket in buckets:
        for limit in bucket.limits:
            other = found.get(limit.name)
            if other is None or limit.amount * other.period_ms < other.amount * limit.period_ms:
                found[limit.name] = limit
    return found


class Lease:
    __slots__ = ("_asked_at", "_burst_at", "_capacity", "_chance", "_demand", "_folded_at", "_gain",
                 "_latency", "_left", "_level", "_level_at", "_low", "_offered", "_pauses", "_period",
                 "_promised", "_rate", "_rationed_at", "_renewed_at", "_since", "held", "horizon",
                 "last_call", "names", "not_before", "used")  # fmt: skip

    def __init__(self, buckets: Sequence[RateBucket], now: float, chance: Callable[[], float]) -> None:
        """`chance` gives a number in [0, 1): so that a fleet does not come in step."""
        self._chance = chance
        self.horizon = FIRST_HORIZON
        self.not_before = 0.0  # where there is not enough: until then nobody is asked
        self.last_call = now
        self._since = self._folded_at = now - 1.0  # as if the first call were the first of a second
        self._renewed_at = self._level_at = self._burst_at = self._rationed_at = -inf
        self._asked_at = now
        self._latency = 0.02
        self._pauses = 0
        self._period = LEAST_HORIZON  # as it was when somebody was told to wait
        self.names: tuple[str, ...] = ()
        self.held: list[int] = []
        self.used: list[int] = []  # and not told yet
        self._demand: list[float] = []  # a second; the last one counts calls
        self._offered: list[int] = []  # since the last fold
        self._gain: list[float] = []  # a second, as the store has given of late
        self._left: list[int] = []  # in the bucket, as last seen
        self._level: list[float] = []  # of the bucket, as found on average
        self._promised: list[int] = []  # to those who were told to come back
        self.fit(buckets)

    def fit(self, buckets: Sequence[RateBucket]) -> None:
        """The settings as they are now. What is held stays, up to the capacity."""
        limits, before = tightest(buckets), self.names
        places = [before.index(name) if name in before else None for name in limits]
        capacity: dict[str, int] = {}
        for bucket in buckets:
            for limit in bucket.limits:
                capacity[limit.name] = min(limit.capacity, capacity.get(limit.name, limit.capacity))
        self.names = tuple(limits)
        self._capacity = [capacity[name] for name in limits]
        self._rate = [limit.amount * 1000 / limit.period_ms for limit in limits.values()]
        kept = [0 if place is None else self.held[place] for place in places]
        self.held = [min(amount, most) for amount, most in zip(kept, self._capacity, strict=True)]
        self.used = [0 if place is None else self.used[place] for place in places]
        calls = (self._demand[-1], self._offered[-1]) if self._demand else (0.0, 0)
        self._demand = [0.0 if place is None else self._demand[place] for place in places] + [calls[0]]
        self._offered = [0 if place is None else self._offered[place] for place in places] + [calls[1]]
        self._gain = list(self._rate)  # it may be alone
        self._level = [float(most) for most in self._capacity]
        self._left = list(self._capacity)
        self._level_at = -inf
        self._promised = [0] * len(limits)
        self._low = [0] * len(limits)
        self.not_before = 0.0  # there may be more now

    # For the calls.

    def take(self, costs: Costs, now: float) -> int:
        self.last_call = now
        offered = self._offered
        offered[-1] += 1
        for place, cost in enumerate(costs):
            offered[place] += cost
        if now - self._folded_at >= FOLD_SECONDS:
            self._fold(now)
        return self.take_again(costs, now)

    def take_again(self, costs: Costs, now: float) -> int:
        """For a call that has been counted as demand."""
        held, low, answer = self.held, self._low, TAKEN
        for place, cost in enumerate(costs):
            if cost > held[place] and cost:
                return ASK if now >= self.not_before else self.wait_ms(costs, now)
        for place, cost in enumerate(costs):
            held[place] = left = held[place] - cost
            if left < low[place] and cost:
                answer = TAKEN_BUT_LOW
        return TAKEN if now < self.not_before else answer

    def is_never(self, costs: Costs) -> bool:
        return any(cost > most for cost, most in zip(costs, self._capacity, strict=True))

    def wait_ms(self, costs: Costs, now: float) -> int:
        """Until this call would find enough: when more is asked for, or later if others were told to come then."""
        period, later = self._period, 0
        for place, cost in enumerate(costs):
            self._promised[place] += cost
            each = self._gain[place] * period
            if cost and each > 0:
                later = max(later, int(self._promised[place] / max(each, cost)))
        wait = max(0.0, self.not_before - now) + min(later * period, MOST_TOLD) + self._latency
        return max(1, round(wait * 1000))

    def give_back(self, estimate: Costs, actual: Costs) -> None:
        """What was taken for a call is no more held back for it. Below zero is what is owed: the next top-up pays."""
        held, used = self.held, self.used
        for place, real in enumerate(actual):
            held[place] += estimate[place] - real
            used[place] += real

    # For who asks the store.

    def plan(self, now: float, need: Costs | None = None) -> Plan:
        """`need`: of a call that waits for it. Who asked must say what came of it."""
        self._fold(now)
        self._asked_at = now
        wants, needs = {}, {}
        for place, name in enumerate(self.names):
            owed = max(0, -self.held[place])
            least = need[place] if need is not None else self._mean_cost(place)
            at_once = min(self._offered[place], self._capacity[place] // 2)  # many calls in one moment
            target = max(self._target(place), least, at_once)
            wants[name] = max(0, target - self.held[place])
            needs[name] = min(wants[name], least + owed if least > self.held[place] else 0)
        used = dict(zip(self.names, self.used, strict=True))
        self.used = [0] * len(self.names)
        is_informed = now - self._level_at < LEVEL_HORIZONS * self.horizon
        share, is_rationed = self._share(wants, now, is_informed)
        is_crowded = self.horizon > FIRST_HORIZON  # many halves asked for at once would be in each other's way
        is_burst = is_rationed and not is_crowded and self._is_burst(now)
        content = 1.0 if is_crowded or (is_rationed and not is_burst) else 1 / BURST_SHARE
        if not is_informed:
            content = 0.0  # there may be more than was thought
        return Plan(wants, needs, used, (1, 2) if is_burst else share, content)

    def renewed(
        self,
        plan: Plan,
        taken: Mapping[str, int],
        left: Mapping[str, int],
        now: float,
        *,
        is_seen: bool = True,
        was_in_the_way: bool = False,
    ) -> None:
        """`is_seen`: what is left is as it was just seen, else it is that at most: others may have taken of it."""
        elapsed = max(now - self._renewed_at, LEAST_RENEWAL) if self._renewed_at > 0 else self._renewal()
        self._renewed_at = now
        is_short = False
        for place, name in enumerate(self.names):
            got, want = taken.get(name, 0), plan.wants.get(name, 0)
            self.held[place] += got
            is_short |= got < want * plan.content
            gain = min(got / elapsed, self._rate[place]) if self._rate[place] > 0 else got / elapsed
            self._gain[place] += (gain - self._gain[place]) * min(1.0, elapsed / (2 * self.horizon))
        self._found(left, taken, now, is_seen)
        self._adapt(was_in_the_way, now)
        self._pauses = 0
        self._wait_for_more(now, is_short)
        self._fold_low()

    def refused(self, plan: Plan, wait_ms: int | None, left: Mapping[str, int], now: float) -> None:
        if all(left.get(name, need) >= need for name, need in plan.needs.items()):
            self.failed(plan, now, was_in_the_way=True)  # there is enough: others were faster each time
            return
        self._untold(plan)
        self._found(left, {}, now, True)
        self._adapt(False, now)
        self._burst_at, self._rationed_at = -inf, now
        self._wait_for_more(now, True)
        self.not_before = max(self.not_before, now + min((wait_ms or 0) / 1000, MOST_HORIZON))

    def failed(self, plan: Plan, now: float, *, was_in_the_way: bool) -> None:
        """Nothing was taken, nothing told."""
        self._untold(plan)
        if was_in_the_way:
            self._adapt(True, now)
            pause = min(MOST_PAUSE, max(self._latency, FIRST_PAUSE * 2**self._pauses))
            self._pauses = min(self._pauses + 1, 10)
            self.not_before = now + pause * (0.5 + self._chance())

    def _untold(self, plan: Plan) -> None:
        for place, name in enumerate(self.names):
            self.used[place] += plan.used.get(name, 0)

    def _found(self, left: Mapping[str, int], taken: Mapping[str, int], now: float, is_seen: bool) -> None:
        weight = max(LEVEL_WEIGHT, min(1.0, (now - self._level_at) / LEVEL_SECONDS))
        for place, name in enumerate(self.names):
            level = max(0, left.get(name, 0) + taken.get(name, 0))
            before = self._level[place]
            self._left[place] = left.get(name, self._left[place])
            if name in left and (is_seen or level < before):
                has_sunk = level < before / 2
                self._level[place] += (level - before) * (max(weight, SUNK_WEIGHT) if has_sunk else weight)
        if is_seen:
            self._level_at = now

    def _adapt(self, was_in_the_way: bool, now: float) -> None:
        self._latency = now - self._asked_at
        if self._latency > TOO_SLOW_SECONDS:
            self.horizon *= FAR_LONGER
        elif was_in_the_way or self._latency > SLOW_SECONDS:
            self.horizon *= LONGER
        else:
            self.horizon = 1 / (1 / self.horizon + MORE_A_SECOND)
        self.horizon = min(MOST_HORIZON, max(LEAST_HORIZON, self.horizon))

    def _wait_for_more(self, now: float, is_short: bool) -> None:
        self._period = period = self._renewal()
        self.not_before = now + period * (0.85 + 0.3 * self._chance()) if is_short else 0.0
        for place, gain in enumerate(self._gain):
            self._promised[place] = max(0, self._promised[place] - int(gain * period)) if is_short else 0

    def debt(self, need: Costs | None = None) -> Costs | None:
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
        return now - self.last_call >= max(IDLE_SECONDS, min(gaps, MOST_IDLE_SECONDS))

    def surplus(self, now: float) -> Costs:
        """Held from busier times: what is above two chunks."""
        self._fold(now)
        each = ((held, self._target(place)) for place, held in enumerate(self.held))
        return tuple(held - target if held > 2 * target else 0 for held, target in each)

    def hand_over(self, amounts: Costs | None = None) -> tuple[dict[str, int], dict[str, int]]:
        """What goes back, all unless it is said how much (below zero where it owes), and what was used."""
        given = dict(zip(self.names, self.held if amounts is None else amounts, strict=True))
        used = dict(zip(self.names, self.used, strict=True))
        self.held = [held - given[name] for name, held in zip(self.names, self.held, strict=True)]
        self.used = [0] * len(self.names)
        return given, used

    def about(self) -> list[tuple[str, int]]:
        """What is held, and what the bucket had when it was last seen; by limit."""
        found, held, left, capacity = [], self.held, self._left, self._capacity
        for place, name in enumerate(self.names):
            most, amount = capacity[place], held[place] + left[place]
            found.append((name, amount if amount < most else most))
        return found

    @property
    def is_empty(self) -> bool:
        return not any(self.held) and not any(self.used)

    # How much.

    def _fold(self, now: float) -> None:
        passed = now - self._folded_at
        if passed < FOLD_SECONDS / 5:
            return
        memory = max(MEMORY_SECONDS, self.horizon)
        weight = min(1.0, passed / min(max(now - self._since, passed), memory))
        for place, offered in enumerate(self._offered):
            self._demand[place] += (offered / passed - self._demand[place]) * weight
            self._offered[place] = 0
        self._folded_at = now
        self._fold_low()

    def _fold_low(self) -> None:
        for place in range(len(self.names)):
            lasting = self._demand[place] * LATENCIES * self._latency
            low = max(LOW_SHARE * self._target(place), lasting, self._mean_cost(place))
            self._low[place] = int(min(low, 0.75 * self._target(place)))

    def _mean_cost(self, place: int) -> int:
        calls = self._demand[-1]
        return round(self._demand[place] / calls) if calls > 0 else 0

    def _seconds(self) -> float:
        """That a chunk is for."""
        calls = self._demand[-1]
        return min(MOST_HORIZON, max(self.horizon, FEW_CALLS / calls if calls > 0 else 0.0))

    def _target(self, place: int) -> int:
        capacity = self._capacity[place]
        chunk = min(self._demand[place] * self._seconds(), capacity / MOST_OF_BUCKET)
        return round(max(chunk, min(LEAST_CALLS * self._mean_cost(place), capacity / 2)))

    def _renewal(self) -> float:
        """Seconds between two questions where there is not enough: a bucket must not run over in between."""
        each = zip(self._capacity, self._gain, strict=True)
        soonest = min((most / MOST_OF_BUCKET / gain for most, gain in each if gain > 0), default=inf)
        return max(LEAST_RENEWAL, min(self._seconds(), soonest))

    def _is_burst(self, now: float) -> bool:
        if now - self._rationed_at > BURST_AFTER:
            self._burst_at = now
        self._rationed_at = now
        return now - self._burst_at < BURST_SECONDS

    def _share(self, wants: Mapping[str, int], now: float, is_informed: bool) -> tuple[tuple[int, int], bool]:
        """Of what is there, at most, never more than a half; and whether that is less than wanted, for being fair."""
        period = self._renewal()
        elapsed = min(max(now - self._renewed_at, period / 2), 2 * period)
        fair, enough, is_rationed = 0.5, 0.0, False
        for place, name in enumerate(self.names):
            rate, level = self._rate[place], max(1.0, self._level[place] if is_informed else self._capacity[place])
            if rate <= 0:
                enough = 0.5
                continue
            brim = min(self._capacity[place] * BRIM_SHARE, BRIM_SECONDS * rate)
            part = elapsed * rate / brim * (level / brim) ** (STEEPNESS - 1)
            enough = max(enough, SLACK * wants[name] / level)
            if wants[name] > part * level:
                fair, is_rationed = min(fair, part), True
        return (max(1, round(min(fair, enough) * SHARE_UNIT)), SHARE_UNIT), is_rationed
