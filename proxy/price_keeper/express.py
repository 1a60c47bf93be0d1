"""The short way through the same rooms, for what most calls are: nothing has to be waited for until Bedrock answers.

No task is made for such a call. Where one of the rooms would have to ask somebody, the pipeline takes over: before
anything has changed, or behind the question that is still open.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from price_keeper.answers import answer_failure
from price_keeper.auth.identify import Identify
from price_keeper.choosing import LARGE_BYTES, Choosing, Road, Told
from price_keeper.exchange import Request, Responder
from price_keeper.forwarding.forwarder import Call, Forwarder
from price_keeper.forwarding.joining import Joining, Shared
from price_keeper.forwarding.model_path import Operation
from price_keeper.forwarding.relay import Outcome
from price_keeper.metering import guardrails
from price_keeper.model import Caller, Choice
from price_keeper.recording.meter import Meter, Terms
from price_keeper.recording.metering import Metering
from price_keeper.selection.admitting import Admitting
from price_keeper.selection.payer import Payer
from price_keeper.selection.serving import decision_told
from price_keeper.surface.calls import Asked, Headers, headers_upstream, retry_key, understood
from price_keeper.traffic import Traffic

# Whose bodies are sent as they come.
_OPERATIONS: Final = frozenset(
    {Operation.CONVERSE, Operation.CONVERSE_STREAM, Operation.INVOKE, Operation.INVOKE_STREAM},
)
_OF_A_MODEL: Final = b"/model/"  # what begins otherwise may name its model in a body, and no stranger's body is read
MOST_ENTRANCES: Final = 1000

Over = Callable[[], None]


class GoesOn(Protocol):
    def __call__(
        self, request: Request, caller: Caller, asked: Asked, headers: Headers, responder: Responder, told: Told
    ) -> Coroutine[Any, Any, None]:
        """From the caller's limits on, of which one has to wait for more."""


class _Entrance:
    """What all calls of one target have in common; and by which label they are served, that one's road."""

    __slots__ = ("asked", "choice", "roads", "terms")

    def __init__(self, asked: Asked, choice: Choice, terms: Terms) -> None:
        self.asked = asked
        self.choice = choice
        self.terms = terms
        self.roads: dict[str, Road] = {}


class Express:
    def __init__(
        self,
        identify: Identify,
        admitting: Admitting,
        choosing: Choosing,
        forwarder: Forwarder,
        joining: Joining,
        simulated_prefix: bytes | None,
        new_request_id: Callable[[], bytes],
        goes_on: GoesOn,
        once: Callable[[Coroutine[Any, Any, None]], None],
        traffic: Traffic,
    ) -> None:
        self._identify = identify
        self._admitting = admitting
        self._choosing = choosing
        self._joining = joining
        self._metering: Metering = choosing.metering
        self._simulated_prefix = simulated_prefix
        self._new_request_id = new_request_id
        self._goes_on = goes_on
        self._entrances: dict[bytes, _Entrance] = {}
        self.forwarder = forwarder
        self.once = once
        self.traffic = traffic

    def take_on(self, choosing: Choosing) -> None:
        """That of another configuration, with roads of its own. What is on its way needs none of it."""
        self._choosing, self._metering = choosing, choosing.metering
        self._entrances = {}

    def __call__(self, request: Request, responder: Responder, over: Over) -> bool:
        """Whether the call has been taken; `over` is told once when nothing of it is under way any more."""
        if request.method != b"POST" or len(request.body) >= LARGE_BYTES:
            return False
        entrance = self._entrances.get(request.target) or self._opened(request)
        if entrance is None:
            return False
        told: Told = [(b"x-price-keeper-request-id", self._new_request_id())]
        try:
            caller = self._identify.known(request)
            return caller is not None and self._is_taken(request, caller, entrance, responder, told, over)
        except Exception as failure:
            lane = self.traffic.lane(entrance.asked.operation.name, "")
            # Kept by no name here: the refusal knows this frame, so that only the collector would end the two.
            self.traffic.refuses(answer_failure(responder, told, failure), lane)
            over()
            return True

    def _opened(self, request: Request) -> _Entrance | None:
        """None where the pipeline is to see what comes of it."""
        if not request.target.startswith(_OF_A_MODEL):
            return None
        try:
            asked = understood(request)
            choice = self._choosing.configured(asked.model) if asked.operation in _OPERATIONS else None
            terms = None if choice is None else self._metering.terms(choice, asked.operation, request.method)
        except Exception:  # which the pipeline is to answer, and to tell of
            return None
        if choice is None or terms is None:
            return None
        if len(self._entrances) >= MOST_ENTRANCES:
            self._entrances.clear()
        entrance = self._entrances[request.target] = _Entrance(asked, choice, terms)
        return entrance

    def _is_taken(
        self, request: Request, caller: Caller, entrance: _Entrance, responder: Responder, told: Told, over: Over
    ) -> bool:
        limits, payer = self._admitting.known(caller), self._choosing.known(caller)
        if limits is None or payer is None:
            return False
        headers, asked = headers_upstream(request, self._simulated_prefix), entrance.asked
        key = retry_key(request, caller, headers)
        if key is not None and self._joining.join(key, responder):
            over()
            return True
        limited = None
        if limits.buckets:
            limited = self._admitting.at_once(limits, entrance.terms.tokens(len(request.body)), told)
            if limited is None:
                rest = self._goes_on(request, caller, asked, headers, responder, told)
                self.once(_and_then(rest, over))
                return True
        try:
            road, meter = self._metered(request, caller, payer, entrance, told, () if limited is None else (limited,))
        except BaseException:
            if limited is not None:
                limited.close()
            raise
        call = Call("POST", "", headers, _always(request.body), road.targets, road.lane, request.taken_at)
        shared = None if key is None else self._joining.share(key, responder)
        _Flight(self, call, responder if shared is None else shared, told, meter, shared, over).begin()
        return True

    def _metered(
        self, request: Request, caller: Caller, payer: Payer, entrance: _Entrance, told: Told, ends: tuple[Any, ...]
    ) -> tuple[Road, Meter]:
        choosing, asked, body = self._choosing, entrance.asked, request.body
        decision = choosing.decided(payer, entrance.choice, entrance.terms, asked, told)
        road = entrance.roads.get(decision.label)
        if road is None:
            road = choosing.road(payer, asked, request, entrance.choice, entrance.terms, decision)
            if road.is_everybodys:
                entrance.roads[decision.label] = road
        told += road.told
        told += decision_told(decision)
        terms = road.terms
        units = guardrails.units_asked(terms.operation, request.headers, body)
        account = payer.account(terms.counted_as)
        meter = self._metering.meter(terms, account, caller, road.targets, len(body), units, ends)
        told.append((b"x-price-keeper-price-source", meter.price_source.encode()))
        return road, meter


class _Flight:
    """One call that is on its way."""

    __slots__ = ("_call", "_express", "_meter", "_over", "_responder", "_shared", "_told")

    def __init__(
        self,
        express: Express,
        call: Call,
        responder: Responder,
        told: Told,
        meter: Meter,
        shared: Shared | None,
        over: Over,
    ) -> None:
        self._express = express
        self._call = call
        self._responder = responder
        self._told = told
        self._meter = meter
        self._shared = shared
        self._over: Over | None = over

    def begin(self) -> None:
        try:
            if not self._express.forwarder.forward_at_once(
                self._call, self._responder, self._told, self._meter, self._ended
            ):
                self._express.once(self._go_on(None))
        except Exception as failure:
            self._fails(failure)

    def _ended(self, outcome: Outcome) -> None:
        if outcome.status and not outcome.held_back:
            self._is_over()
        else:
            self._express.once(self._go_on(outcome))

    async def _go_on(self, before: Outcome | None) -> None:
        try:
            await self._express.forwarder.forward(self._call, self._responder, self._told, self._meter, before)
        except Exception as failure:
            self._fails(failure)
        finally:
            self._is_over()

    def _fails(self, failure: Exception) -> None:
        try:
            self._meter.close()
        except Exception as another:  # the caller must get an answer in any case
            failure = another
        self._express.traffic.refuses(answer_failure(self._responder, self._told, failure), self._call.lane)
        self._let_go()

    def _is_over(self) -> None:
        try:
            self._meter.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        over, self._over = self._over, None
        if over is None:
            return
        over()
        if self._shared is not None:
            self._shared.abort()  # whatever became of the call: without an answer by now nobody is to wait for one


async def _and_then(rest: Coroutine[Any, Any, None], over: Over) -> None:
    try:
        await rest
    finally:
        over()


def _always(body: bytes) -> Callable[[str], bytes]:
    return lambda _: body
