"""The room between who calls and what is sent: which label serves a call, who pays for it, and on which terms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from price_keeper.aside import run_large_work
from price_keeper.errors import QuotaExceeded, Refusal
from price_keeper.exchange import Header, Request
from price_keeper.forwarding.forwarder import UpstreamTarget
from price_keeper.hard.purse import Held
from price_keeper.hard.worst import Worst
from price_keeper.metering.profiles import OwnChoice
from price_keeper.model import Caller, ResolvedLabel
from price_keeper.recording.entries import Account
from price_keeper.recording.meter import Terms
from price_keeper.recording.metering import Metering
from price_keeper.selection.hard_budgets import Asking, Candidate, HardBudgets
from price_keeper.selection.labels import LabelResolver
from price_keeper.selection.payer import CallerDay
from price_keeper.selection.serving import EXCEEDED_HEADER, FORMAT_SPECIFIC_OPERATIONS, build_decision_headers
from price_keeper.selection.standing import Decision
from price_keeper.selection.standings import BudgetRegistry
from price_keeper.surface.calls import ParsedCall, locate_model
from price_keeper.traffic import OperationStats, RequestStats

LARGE_BYTES: Final = 256 * 1024  # of a body, which takes milliseconds to look into
LABEL_TOLD: Final = b"x-price-keeper-label"

# From a choice to the places that can carry it out; the path is the operation's, for the model of each.
Targets = Callable[[ResolvedLabel, ParsedCall], list[UpstreamTarget]]
Told: TypeAlias = "list[Header]"  # the headers of our own that the answer gets, more of them with every room

P = ParamSpec("P")
T = TypeVar("T")


class Chosen(NamedTuple):
    """`body` is what is to be sent, and `asked` where it names its model. What costs nothing has no terms. `metering`
    is that of the configuration by which it was chosen."""

    metering: Metering
    choice: ResolvedLabel
    asked: ParsedCall
    body: bytes
    targets: list[UpstreamTarget]
    lane: OperationStats
    terms: Terms | None = None
    account: Account | None = None
    worst: Worst | None = None
    held: Held | None = None


class Destination(NamedTuple):
    """What all calls of one route that one label serves have in common."""

    choice: ResolvedLabel
    terms: Terms
    targets: list[UpstreamTarget]
    told: tuple[Header, ...]
    lane: OperationStats


class Route:
    """What a request asks for, by the labels and prices of `choosing`. Those of configured labels are kept by their
    targets, each with its destinations by the label that serves."""

    __slots__ = ("asked", "choice", "choosing", "destinations", "terms")

    def __init__(self, choosing: Choosing, asked: ParsedCall, choice: ResolvedLabel, terms: Terms | None) -> None:
        self.choosing = choosing
        self.asked = asked
        self.choice = choice
        self.terms = terms
        self.destinations: dict[str, Destination] = {}


class _Succeeded(Exception):
    """The labels by which a call was named are not those of the standings any more."""


class Choosing:
    def __init__(
        self,
        labels: LabelResolver,
        standings: BudgetRegistry,
        metering: Metering,
        targets: Targets,
        admit: Callable[[], None],
        hard: HardBudgets,
        traffic: RequestStats,
    ) -> None:
        """`admit` raises where what a call costs could not be recorded."""
        self._labels = labels
        self._standings = standings
        self.metering = metering
        self._targets = targets
        self._admit = admit
        self._hard = hard
        self._traffic = traffic
        self.successor: Choosing | None = None  # once another configuration is taken on

    def configured(self, model: str) -> ResolvedLabel | None:
        return self._labels.resolve_configured(model)

    def cached(self, caller: Caller, route: Route, request: Request, told: Told) -> Chosen | None:
        """As `chosen`, without waiting. None where that has to be asked: for what costs nothing, under a hard budget,
        and while the state of the budget is not known or too old. Raises a Refusal."""
        asked, choice, terms = route.asked, route.choice, route.terms
        if terms is None:
            return None
        payer = self._standings.cached(caller)
        if payer is None or payer.budget.settings.enforcement == "hard":
            return None
        self._admit()
        try:
            decision = _decided(payer, choice, terms, asked)
        except Refusal as refusal:
            told += _refusal_told(choice, refusal)
            raise
        found = route.destinations.get(decision.label)
        if found is None:
            found = self._destination(payer, asked, request, choice, terms, decision)
            if type(found.choice) is not OwnChoice:  # which another app may have under the same name
                route.destinations[decision.label] = found
        choice, terms, targets, choice_told, lane = found
        told += choice_told
        told += build_decision_headers(decision)
        account = payer.get_charged_counters(terms.counted_as)
        return Chosen(self.metering, choice, asked, request.body, targets, lane, terms, account)

    def _destination(
        self, payer: CallerDay, asked: ParsedCall, request: Request, choice: ResolvedLabel, terms: Terms, decision: Decision
    ) -> Destination:
        choice, terms = self._instead(payer, asked, request, choice, terms, decision)
        lane = self._traffic.get_stats(asked.operation.name, terms.counted_as)
        return Destination(choice, terms, self._targets(choice, asked), _choice_told(choice), lane)

    async def named(self, caller: Caller, asked: ParsedCall) -> ResolvedLabel:
        """What the caller asks for, by the labels in force when it is answered. Raises InvalidRequest and Busy."""
        choice = self._labels.resolve_configured(asked.model) if asked.model else ResolvedLabel("", "", "")
        if choice is not None:
            return choice
        own = await self._standings.app_labels.get(caller)
        if self.successor is not None:  # and a name may have gone from an app's own labels to those
            return await self.successor.named(caller, asked)
        return self._labels.resolve(asked.model, own)

    async def chosen(
        self, caller: Caller, asked: ParsedCall, request: Request, choice: ResolvedLabel, terms: Terms | None, told: Told
    ) -> Chosen:
        """What it gets. `told` hears of it. Raises a Refusal."""
        if terms is None:
            told += _choice_told(choice)
            lane = self._traffic.get_stats(asked.operation.name, choice.label)
            return Chosen(self.metering, choice, asked, request.body, self._targets(choice, asked), lane)
        self._admit()
        payer = self._standings.cached(caller) or await self._standings.load(caller)
        if self.successor is not None:
            return await self.successor._chosen_anew(caller, asked, request, told)
        try:
            if payer.budget.settings.enforcement == "hard":
                return await self._held(payer, asked, request, choice, terms, told)
            decision = _decided(payer, choice, terms, asked)
        except _Succeeded:
            assert self.successor is not None
            return await self.successor._chosen_anew(caller, asked, request, told)
        except Refusal as refusal:
            told += _refusal_told(choice, refusal)
            raise
        choice, terms, targets, choice_told, lane = self._destination(payer, asked, request, choice, terms, decision)
        told += (*choice_told, *build_decision_headers(decision))
        account = payer.get_charged_counters(terms.counted_as)
        return Chosen(self.metering, choice, asked, request.body, targets, lane, terms, account)

    async def _chosen_anew(self, caller: Caller, asked: ParsedCall, request: Request, told: Told) -> Chosen:
        """For a call that had its name read by labels that are none any more when its budget was known. Standings know
        one set of labels, so no decision mixes two."""
        choice = await self.named(caller, asked)
        terms = self.metering.terms(choice, asked.operation, request.method)
        return await self.chosen(caller, asked, request, choice, terms, told)

    def _instead(
        self, payer: CallerDay, asked: ParsedCall, request: Request, choice: ResolvedLabel, terms: Terms, decision: Decision
    ) -> tuple[ResolvedLabel, Terms]:
        """What was asked for, unless it was decided otherwise."""
        if decision.label in (choice.label, terms.counted_as):
            return choice, terms
        choice = self._labels.substitute(choice, decision.label, payer.budget.app_labels)
        return choice, self.metering.terms(choice, asked.operation, request.method) or terms

    async def _held(
        self, payer: CallerDay, asked: ParsedCall, request: Request, choice: ResolvedLabel, terms: Terms, told: Told
    ) -> Chosen:
        def candidate(decision: Decision) -> Candidate:
            instead, its_terms = self._instead(payer, asked, request, choice, terms, decision)
            return Candidate(instead, its_terms, self._targets(instead, asked))

        request.reserve_copies(1)  # with a limit of its answer in it, or as it is sent to be counted
        asking = Asking(asked.operation, request.headers, request.body)

        def decide(dry: Collection[str]) -> Decision:
            if self.successor is not None:  # and what is held has been let go by now
                raise _Succeeded
            return _decided_hard(payer, choice, terms, asked, dry)

        decision, (choice, terms, targets), worst, held = await self._hard.paid(
            payer.budget, asking, decide, candidate
        )
        told += (*_choice_told(choice), *build_decision_headers(decision))
        body = request.body
        hold = None if held is None else self._hard.hold_counter(held, payer.budget.settings.shards)
        account = payer.get_charged_counters(terms.counted_as, hold)
        if worst is not None and worst.body is not body:  # it says now how long the answer may be
            body = worst.body
            try:
                asked = await off_the_loop(body, locate_model, asked, body)
            except BaseException:
                if held is not None:
                    held.on_cancelled()
                raise
        lane = self._traffic.get_stats(asked.operation.name, terms.counted_as)
        return Chosen(self.metering, choice, asked, body, [*targets], lane, terms, account, worst, held)


def _decided(payer: CallerDay, choice: ResolvedLabel, terms: Terms, asked: ParsedCall) -> Decision:
    standing, is_specific = payer.budget, asked.operation in FORMAT_SPECIFIC_OPERATIONS
    if terms.counted_as != choice.label:
        return standing.decide_without_fallback(terms.counted_as)
    if type(choice) is OwnChoice:
        return standing.decide_app_label(choice.label, is_specific)
    return standing.decide(choice.label, is_specific)


def _decided_hard(payer: CallerDay, choice: ResolvedLabel, terms: Terms, asked: ParsedCall, dry: Collection[str]) -> Decision:
    standing = payer.budget
    if terms.counted_as != choice.label:
        return standing.decide_hard_without_fallback(terms.counted_as, dry)
    return standing.decide_hard(choice.label, asked.operation in FORMAT_SPECIFIC_OPERATIONS, dry)


def _refusal_told(choice: ResolvedLabel, refusal: Refusal) -> Told:
    return [*_choice_told(choice)[:1], *([EXCEEDED_HEADER] if isinstance(refusal, QuotaExceeded) else [])]


def _choice_told(choice: ResolvedLabel) -> tuple[Header, ...]:
    if not choice.requested:
        return ()
    return (
        (b"x-price-keeper-requested", choice.requested.encode()),
        (LABEL_TOLD, choice.label.encode()),
        (b"x-price-keeper-model", choice.model.encode()),
    )


async def off_the_loop(body: bytes, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """In a thread if the body is large, as looking into it would keep everybody waiting."""
    if len(body) < LARGE_BYTES:
        return work(*arguments, **named)
    return await run_large_work(work, *arguments, **named)
