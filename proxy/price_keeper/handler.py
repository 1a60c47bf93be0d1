"""Every request to the data port, from its first byte to its last: START HERE.

    authenticate -> parse -> join a retry -> reserve rate limits -> select a label -> meter -> forward

`RequestHandler.__call__` is one coroutine, and every request runs it, over HTTP/1.1 and HTTP/2 alike. `Tasks.begin`
runs it without a task for as long as it does not wait. With warm caches that is until the call has been written to
Bedrock; a task then waits for the end of the answer. Whatever may do I/O stands behind `in_task`, because
`asyncio.timeout` works in tasks alone.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol

from price_keeper.answers import send_error, send_json
from price_keeper.auth.container import HandsOut
from price_keeper.auth.identify import Identify
from price_keeper.choosing import LABEL_TOLD, LARGE_BYTES, Choosing, Chosen, Route, Told, off_the_loop
from price_keeper.errors import Refusal, UnknownOperation
from price_keeper.exchange import Request, Responder, create_request_id_source
from price_keeper.forwarding import chat_usage, request_metadata
from price_keeper.forwarding.forwarder import Call, Forwarder
from price_keeper.forwarding.joining import Joining, Shared
from price_keeper.forwarding.model_path import Operation
from price_keeper.metering import guardrails
from price_keeper.metering.streams import usage_event_only
from price_keeper.model import Caller
from price_keeper.recording.entries import Ended
from price_keeper.recording.metering import FREE_OF_CHARGE, Metered
from price_keeper.selection.admitting import Admitting
from price_keeper.surface.calls import ParsedCall, select_upstream_headers, check_target, compute_retry_key, parse_call
from price_keeper.tasks import in_task
from price_keeper.traffic import NONE, Traffic

# Endpoints of our own, by their names in metrics.
_CREDENTIALS, _PROFILES = "credentials", "inference_profiles"

_OF_A_MODEL: Final = b"/model/"  # other paths name their model, if any, in the body
MOST_ROUTES: Final = 1000


class Waiting(Ended, Protocol):
    """Told once how a call ended, or that it was never sent."""

    def close(self) -> None:
        """It was never sent."""


class RequestHandler:
    def __init__(
        self,
        identify: Identify,
        admitting: Admitting,
        choosing: Choosing,
        forwarder: Forwarder,
        joining: Joining,
        credentials: HandsOut,
        simulated_prefix: bytes | None,
        tells_who_calls: bool,
        traffic: Traffic,
    ) -> None:
        self._identify = identify
        self._admitting = admitting
        self._choosing = choosing
        self._forwarder = forwarder
        self.joining = joining
        self._credentials = credentials
        self._simulated_prefix = simulated_prefix
        self._tells_who_calls = tells_who_calls
        self.traffic = traffic
        self.new_request_id = create_request_id_source()
        self._routes: dict[bytes, Route] = {}  # by target; those of the configured labels alone

    @property
    def choosing(self) -> Choosing:
        return self._choosing

    def take_on(self, choosing: Choosing) -> None:
        """Use another configuration's labels and prices for every request that has not been routed yet."""
        before, self._choosing = self._choosing, choosing
        before.successor = choosing
        self._routes = {}

    def check_head(self, request: Request) -> Refusal | None:
        """Why reading the body of this request would be of no use. Reads caches only."""
        refusal = check_target(request.target)
        if refusal is None:
            try:
                self._identify.known(request)
            except Refusal as failure:
                return failure.with_traceback(None)
        return refusal

    async def __call__(self, request: Request, responder: Responder) -> None:
        told: Told = [(b"x-price-keeper-request-id", self.new_request_id())]
        with _ErrorBoundary(responder, told, self.traffic) as boundary, _PendingCallbacks() as pending:
            if request.target == b"/credentials":
                return await self._hand_out_credentials(request, boundary)
            if request.target.partition(b"?")[0] == b"/inference-profiles":
                return await self._list_no_profiles(request, boundary)

            # The caller, before any byte of the body is parsed.
            route = self._routes.get(request.target) if request.method == b"POST" else None
            if route is not None:
                boundary.operation = route.asked.operation.name
            caller = self._identify.known(request)
            if caller is None:
                await in_task()
                caller = await self._identify.learned(request)

            # What the call asks for; a retry of a call that is still under way shares its answer.
            asked = await off_the_loop(request.body, parse_call, request) if route is None else route.asked
            boundary.operation = asked.operation.name
            headers = select_upstream_headers(request, self._simulated_prefix)
            if request.observer is not None:
                request.observer.on_authenticated(caller)
                pending.add(request.observer)
            if route is None:
                route = await self._find_route(request, caller, asked)
            key = compute_retry_key(request, caller, headers)
            if key is not None:
                if self.joining.join(key, responder):
                    return None
                responder = boundary.share(self.joining.share(key, responder))

            # Rate limits, then the label that serves, then a meter: from here on money is set aside.
            tokens = 0 if route.terms is None else route.terms.tokens(len(request.body))
            limits = self._admitting.known(caller)
            if limits is None or limits.buckets:
                reserved = None if limits is None else self._admitting.at_once(limits, tokens, told)
                if reserved is None:
                    await in_task()
                    reserved = await self._admitting.admitted(caller, tokens, told, is_counted=limits is not None)
                pending.add(reserved)
            choosing = route.choosing
            chosen = choosing.cached(caller, route, request, told) if choosing is self._choosing else None
            if chosen is None:
                await in_task()
                chosen = await choosing.chosen(caller, route.asked, request, route.choice, route.terms, told)
                pending.add(chosen.held)
            await self._send(request, caller, chosen, headers, responder, told, pending)
        return None

    async def _find_route(self, request: Request, caller: Caller, asked: ParsedCall) -> Route:
        """The model that the caller's words stand for, and what the call may cost."""
        choice = self._choosing.configured(asked.model) if asked.model else None
        is_everybodys = choice is not None and request.target.startswith(_OF_A_MODEL) and request.method == b"POST"
        if choice is None:
            await in_task()
            choice = await self._choosing.named(caller, asked)
        choosing = self._choosing  # which is another one if labels were reloaded meanwhile
        terms = choosing.metering.terms(choice, asked.operation, request.method)
        route = Route(choosing, asked, choice, terms)
        if is_everybodys and terms is not None:
            if len(self._routes) >= MOST_ROUTES:
                self._routes.clear()
            self._routes[request.target] = route
        return route

    async def _send(
        self,
        request: Request,
        caller: Caller,
        chosen: Chosen,
        headers: list[tuple[str, str]],
        responder: Responder,
        told: Told,
        pending: _PendingCallbacks,
    ) -> None:
        asked, body, operation = chosen.asked, chosen.body, chosen.asked.operation
        to_be_sent = _unchanged
        if operation is Operation.CHAT_COMPLETIONS and await off_the_loop(body, chat_usage.is_to_be_asked, body):
            request.reserve_copies(1)
            responder, to_be_sent = chat_usage.WithoutUsage(responder, usage_event_only), chat_usage.with_usage_asked
        if asked.model_span is not None:
            request.reserve_copies(1)  # with the name of its label's model in it
        if self._tells_who_calls:
            request.reserve_copies(1)
            known = request_metadata.identity(caller.org, caller.app, chosen.choice.label)
            headers, body = await off_the_loop(body, request_metadata.tell, operation, known, headers, body)
        units = 0
        if chosen.terms is not None:
            if len(request.body) < LARGE_BYTES:
                units = guardrails.units_asked(operation, request.headers, request.body)
            else:
                units = await off_the_loop(
                    request.body, guardrails.units_asked, operation, request.headers, request.body
                )
        call = Call(
            request.method.decode(),
            "",  # no operation that gets so far takes a query
            headers,
            lambda model: to_be_sent(asked.body_with_model(model, body)),
            chosen.targets,
            chosen.lane,
            request.received_at,
        )
        meter = self._meter(caller, chosen, len(body), units, pending)
        if meter.price_source:
            told.append((b"x-price-keeper-price-source", meter.price_source.encode()))
        try:
            await self._forwarder.forward(call, responder, told, meter)
        finally:
            meter.close()

    def _meter(
        self, caller: Caller, chosen: Chosen, body_bytes: int, units: int, pending: _PendingCallbacks
    ) -> Metered:
        """Write the call's intent. From here on its meter tells the callbacks how it ended."""
        if chosen.terms is None or chosen.account is None:
            for each in pending.handed_over():
                each.ended(None)
            return FREE_OF_CHARGE
        meter = chosen.metering.meter(
            chosen.terms, chosen.account, caller, chosen.targets, body_bytes, units, pending.all, chosen.worst
        )
        pending.handed_over()
        return meter

    async def _hand_out_credentials(self, request: Request, boundary: _ErrorBoundary) -> None:
        boundary.operation = _CREDENTIALS
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await in_task()
        await self._credentials.answer(request, boundary.responder, tuple(boundary.told))
        self.traffic.lane(_CREDENTIALS, "").answered_here(200)

    async def _list_no_profiles(self, request: Request, boundary: _ErrorBoundary) -> None:
        """Claude Code lists inference profiles when it starts; an empty list lets it go on."""
        boundary.operation = _PROFILES
        if self._identify.known(request) is None:
            await in_task()
            await self._identify.learned(request)
        if request.method != b"GET":
            raise UnknownOperation("inference profiles are listed with GET")
        send_json(boundary.responder, {"inferenceProfileSummaries": []}, tuple(boundary.told))
        self.traffic.lane(_PROFILES, "").answered_here(200)


class _ErrorBoundary:
    """Answers the request with whatever was raised inside. Of what nobody raised on purpose only the log says more."""

    __slots__ = ("_shared", "_traffic", "operation", "responder", "told")

    def __init__(self, responder: Responder, told: Told, traffic: Traffic) -> None:
        self.responder = responder
        self.told = told
        self.operation = NONE  # for metrics
        self._traffic = traffic
        self._shared: Shared | None = None

    def share(self, shared: Shared) -> Shared:
        """Answer through this from now on, as retries of the call may share its answer."""
        self.responder = self._shared = shared
        return shared

    def __enter__(self) -> _ErrorBoundary:
        return self

    def __exit__(self, _: type[BaseException] | None, failure: BaseException | None, __: TracebackType | None) -> bool:
        try:
            if not isinstance(failure, Exception):
                return False
            label = next((value.decode() for name, value in self.told if name == LABEL_TOLD), "")
            refusal = send_error(self.responder, self.told, failure)
            self._traffic.refuses(refusal, self._traffic.lane(self.operation, label))
            return True
        finally:
            if self._shared is not None:
                self._shared.abort()  # if there is no whole answer by now, no retry may wait for one


class _PendingCallbacks:
    """The callbacks of a call until its meter takes them over. If it never comes to that, they are told so here."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Waiting, ...] = ()

    def add(self, each: Waiting | None) -> None:
        if each is not None:
            self.all = (*self.all, each)

    def handed_over(self) -> tuple[Waiting, ...]:
        every, self.all = self.all, ()
        return every

    def __enter__(self) -> _PendingCallbacks:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.all:
            each.close()


def _unchanged(body: bytes) -> bytes:
    return body
