"""What Bedrock's books and the sidecars' journals say, call by call."""

from __future__ import annotations

import bisect
import sqlite3
from collections import Counter, deque
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.org_calendar import Period, find_span

from tests.soak.bedrock import read
from tests.soak.fleet import Member
from tests.soak.links import Link
from tests.soak.tenants import HARD, MODELS, PRICES, SHARED, App, pico
from tests.soak.verdict import Verdict

CLOCKS_SECONDS = 0.1  # between two looks at one clock by two processes, on a machine with much to do
WAITING_SECONDS = 10.0  # of a call, for limits and budgets, from when its price is frozen to when its intent is written
LEAST_WAY_SECONDS = 2.0  # from an intent to Bedrock, or back; on a busy machine links hold calls up for longer
HIT_SECONDS = 30.0  # from the start of a call to what hit it, at most
KNOWN_WHYS = {"cut", "no answer", "silent", "unknown"}  # of estimates: the last are found after a kill


class Books:
    def __init__(self, db: sqlite3.Connection, members: list[Member], bedrocks: list[Link], verdict: Verdict) -> None:
        self._db = db
        self._members = {member.name: member for member in members}
        self._hit = set[str]().union(*(link.hit for link in bedrocks))
        self._hit_at = {member.name: sorted(link.hit_at) for member, link in zip(members, bedrocks, strict=True)}
        self._verdict = verdict
        self._way = LEAST_WAY_SECONDS  # the longest that any took

    def load(self, ran: Path, whole: Path) -> None:
        rows = ((*each[:-1], ",".join(map(str, each.tokens))) for each in read(ran))
        self._db.execute("begin")
        self._db.executemany("insert into ran values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._db.executemany("insert into whole values (?)", ([line] for line in whole.read_text().split()))
        self._db.execute("commit")
        self.measure_ways()

    def measure_ways(self) -> None:
        """By the calls that are recorded exactly."""
        query = "select max(arrived - started) from receipts join ran using (request) where why = ''"
        self._way = max(LEAST_WAY_SECONDS, self._one(query) or 0.0)
        self._verdict.figures["from an intent to Bedrock, at most, s"] = round(self._way, 1)

    def _all(self, query: str, *given: Any) -> list[tuple[Any, ...]]:
        return self._db.execute(query, given).fetchall()

    def _one(self, query: str) -> Any:
        return self._db.execute(query).fetchone()[0]

    # Calls whose usage was known.

    def compare_calls(self) -> None:
        verdict = self._verdict
        exact = "select * from receipts where why = ''"
        verdict.figures["calls that Bedrock served"] = self._one("select count(*) from ran")
        verdict.figures["recorded exactly"] = self._one(f"select count(*) from ({exact})")
        twice = "select request from receipts where request != '' group by request having count(*) > 1"
        verdict.none("calls recorded twice", self._all(twice))
        unknown = "select request from receipts where why = '' and request not in (select request from ran)"
        verdict.none("calls recorded that Bedrock never served", self._all(unknown))
        other = "select request from receipts join ran using (request) where why = '' and receipts.tokens != ran.tokens"
        verdict.none("calls recorded with other tokens than Bedrock's", self._all(other))
        lost = """select request from whole join ran using (request) where is_whole
                  and request not in (select request from receipts where why = '')"""
        verdict.figures["answers that callers had whole"] = self._one("select count(*) from whole")
        verdict.none("answers that a caller had whole, and that are not recorded exactly", self._all(lost))
        wrong, either = self._priced()
        verdict.none("calls at another price than the one in force when they began", wrong)
        verdict.figures["calls that began while a price changed"] = either

    def _priced(self) -> tuple[list[str], int]:
        wrong, either = [], 0
        query = """select request, sidecar, label, started, receipts.pico, ran.tokens, ran.model, ran.arrived
                   from receipts join ran using (request) where why = ''"""
        for request, sidecar, label, started, paid, stated_tokens, model, arrived in self._db.execute(query):
            tokens = tuple(map(int, stated_tokens.split(",")))
            versions = self._in_force(sidecar, started)
            may_be = {pico(version, label, tokens) for version in versions}
            either += len(may_be) > 1
            if paid not in may_be or MODELS[label] != model or started > arrived + CLOCKS_SECONDS:
                wrong.append(f"{request} of {sidecar}: {paid} and not {may_be}")
        return wrong, either

    def _in_force(self, sidecar: str, moment: float) -> set[int]:
        """More than one while one took the place of another."""
        history = self._members[sidecar].history
        later = [*history[1:], None]
        return {
            each.version
            for each, after in zip(history, later, strict=True)
            if each.sent <= moment + CLOCKS_SECONDS and (after is None or moment <= after.settled + WAITING_SECONDS)
        }

    def compare_days(self, zones: dict[str, str]) -> None:
        """A call counts on its org's day and, where apps share a budget, for the org as well as for its app; where the
        budget is hard it is paid from a hold. Each sidecar has met each app while the store was there, and has noted
        it: so this holds also for calls to a process that began while the store was away."""
        known = {org: ZoneInfo(zone) for org, zone in zones.items()}
        wrong = []
        query = "select request, sidecar, scope, label, period, started, scopes, is_held from receipts"
        for request, sidecar, scope, label, period, started, scopes, is_held in self._db.execute(query):
            org = scope.split("#")[1]
            days = {find_span(Period.DAY, moment, known[org]).key for moment in (started, started - WAITING_SECONDS)}
            if period not in days or scopes != (2 if org == SHARED else 1) or is_held != (org == HARD):
                held = "" if is_held else ", without a hold"
                wrong.append(f"{request} of {sidecar}: {scope} {label} {period}, {scopes} scopes{held}")
        self._verdict.none("calls on another day, or paid otherwise, than their org says", wrong)

    # Those without a known outcome.

    def explain_estimates(self) -> None:
        verdict = self._verdict
        found = self._all("select sidecar, request, why, pico, started, label from receipts where why != ''")
        whys = Counter(each[2] for each in found)
        verdict.figures["recorded as estimates"] = len(found)
        verdict.figures |= {f"estimates, {why}": count for why, count in sorted(whys.items())}
        strange = [each for each in found if each[2] not in KNOWN_WHYS]
        verdict.none("estimates for another reason than a cut, silence or a kill", strange)
        verdict.none("estimates that cost nothing", [each for each in found if each[3] <= 0])
        ran = {each[0]: each[1:] for each in self._all("select request, invocation, arrived, done, is_whole from ran")}
        named = [each for each in found if each[1]]
        unexplained = [each for each in named if each[1] in ran and not self._is_explained(*ran[each[1]])]
        verdict.none("estimates of calls that nothing befell", unexplained)
        broken = sorted(each[1] for each in ran.values() if not each[3])
        nameless = [
            each for each in found if not (each[1] or self._was_hit(each[0], each[4]) or _follows(broken, each[4]))
        ]
        verdict.none("estimates without an answer at a time at which nothing befell any", nameless)
        self._match(found)

    def _match(self, estimates: list[tuple[Any, ...]]) -> None:
        """Each call that was served and is not recorded exactly has an estimate of its own: under its id, if so much of
        the answer came, or else one of the same label that began shortly before Bedrock heard of the call."""
        query = """select request, invocation, arrived, done, is_whole, model from ran
                   where request not in (select request from receipts where why = '') and fault != 'exception-frame'
                   order by arrived"""
        missing = self._all(query)
        self._verdict.figures["served, and not recorded exactly"] = len(missing)
        spared = [each for each in missing if not self._is_explained(*each[1:5])]
        self._verdict.none("calls not recorded exactly though nothing befell them", spared)
        named = {each[1] for each in estimates if each[1]}
        nameless: dict[str, deque[float]] = {label: deque() for label in MODELS}
        for each in sorted(estimates, key=lambda each: each[4]):
            if not each[1]:
                nameless[each[5]].append(each[4])
        labels = {model: label for label, model in MODELS.items()}
        lost = [
            each
            for each in missing
            if each[0] not in named and not _taken(nameless[labels[each[5]]], each[2] - self._way, each[2])
        ]
        self._verdict.none("calls that were served and of which there is not even an estimate", lost)

    def _is_explained(self, invocation: str, arrived: float, done: float, is_whole: int) -> bool:
        return not is_whole or invocation in self._hit or self._ended_meanwhile(arrived, done)

    def _ended_meanwhile(self, arrived: float, done: float) -> bool:
        """Some sidecar."""
        return any(
            arrived <= until + self._way and done >= since - self._way  # answers take as long as calls
            for member in self._members.values()
            for since, until in member.ends
        )

    def _was_hit(self, sidecar: str, started: float) -> bool:
        if _follows(self._hit_at[sidecar], started):
            return True
        ends = self._members[sidecar].ends
        return any(since - HIT_SECONDS <= started <= until + HIT_SECONDS for since, until in ends)

    def served(self, app: App) -> dict[str, int]:
        """Pico-dollars by label, by Bedrock's books; of a call without a receipt at the lowest price."""
        sums: Counter[str] = Counter()
        query = """select ran.model, ran.tokens, receipts.pico from ran
                   left join receipts on receipts.request = ran.request and why = ''
                   where invocation like ?"""
        labels = {model: label for label, model in MODELS.items()}
        for model, stated_tokens, paid in self._db.execute(query, [f"{app.name}.%"]):
            label, tokens = labels[model], tuple(map(int, stated_tokens.split(",")))
            sums[label] += min(pico(version, label, tokens) for version in range(len(PRICES))) if paid is None else paid
        return dict(sums)


def _follows(moments: list[float], started: float) -> bool:
    """Whether any of these, in order, comes soon after a call began."""
    place = bisect.bisect_left(moments, started - CLOCKS_SECONDS)
    return place < len(moments) and moments[place] <= started + HIT_SECONDS


def _taken(begun: deque[float], earliest: float, arrived: float) -> bool:
    """Takes the first that may be the call's. All have the same time to arrive, so the first fits it best."""
    while begun and begun[0] < earliest:
        begun.popleft()
    if not begun or begun[0] > arrived + CLOCKS_SECONDS:
        return False
    begun.popleft()
    return True
