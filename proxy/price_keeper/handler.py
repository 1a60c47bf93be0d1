"""Every request to the data port, from its first byte to its last: START HERE.

    authenticate -> parse -> join a retry -> reserve rate limits -> select a label -> meter -> forward

`RequestHandler.__call__` is one coroutine; every request runs it, over HTTP/1.1 and HTTP/2 alike. `Tasks.spawn_eager`
runs it without a task. With warm caches it waits once: for the end of the response. Code that may do I/O comes after
`await switch_to_task()`, because `asyncio.timeout` works only inside a task. Every reservation is settled or released
once, whatever is raised.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol

from price_keeper.auth.authenticate import Authenticator
from price_keeper.auth.container_credentials import CredentialIssuer
from price_keeper.budgets.label_selector import (
    LABEL_HEADER,
    LARGE_BODY_BYTES,
    CallRoute,
    LabelSelector,
    ResponseHeaders,
    Selection,
    run_in_thread_if_large,
)
from price_keeper.domain import Caller
from price_keeper.errors import Refusal, UnknownOperation
from price_keeper.exchange import Request, Responder, create_request_id_source
from price_keeper.ledger.ledger_entries import CompletionListener
from price_keeper.local_responses import send_error, send_json
from price_keeper.operations import Operation
from price_keeper.parse_call import ParsedCall, check_target, compute_retry_key, parse_call, select_upstream_headers
from price_keeper.rates.rate_limiter import RateLimiter
from price_keeper.tasks import switch_to_task
from price_keeper.telemetry.request_stats import NONE, RequestStats
from price_keeper.upstream import chat_stream_usage, request_metadata
from price_keeper.upstream.forwarder import Forwarder, UpstreamCall
from price_keeper.upstream.retry_joiner import RetryJoiner, SharedResponse
from price_keeper.usage import guardrail_usage
from price_keeper.usage.meter_factory import FREE_METER, CallMeter
from price_keeper.usage.stream_usage import is_usage_only_event

# Local endpoints, used as metric labels.
_CREDENTIALS_ENDPOINT, _PROFILES_ENDPOINT = "credentials", "inference_profiles"

_MODEL_PATH_PREFIX: Final = b"/model/"  # other paths name their model, if at all, in the body
MAX_ROUTES: Final = 1000


class CancellableListener(CompletionListener, Protocol):
    """Called exactly once per call: with its receipt, or because it was never sent."""

    def on_cancelled(self) -> None:
        """The call was not sent; whatever was reserved for it is released."""


class RequestHandler:
    def __init__(
        self,
        authenticator: Authenticator,
        rate_limiter: RateLimiter,
        label_selector: LabelSelector,
        forwarder: Forwarder,
        retry_joiner: RetryJoiner,
        credential_issuer: CredentialIssuer,
        simulated_prefix: bytes | None,
        adds_request_metadata: bool,
        request_stats: RequestStats,
    ) -> None:
        self._authenticator = authenticator
        self._rate_limiter = rate_limiter
        self._label_selector = label_selector
        self._forwarder = forwarder
        self.retry_joiner = retry_joiner
        self._credential_issuer = credential_issuer
        self._simulated_prefix = simulated_prefix
        self._adds_request_metadata = adds_request_metadata
        self.request_stats = request_stats
        self.new_request_id = create_request_id_source()
        self._routes: dict[bytes, CallRoute] = {}  # by request target; only labels of the configuration

    @property
    def label_selector(self) -> LabelSelector:
        return self._label_selector

    def apply_config(self, label_selector: LabelSelector) -> None:
        """Use the reloaded labels and prices for every request that has no route yet. Calls under way keep theirs."""
        previous, self._label_selector = self._label_selector, label_selector
        previous.redirect_to(label_selector)
        self._routes = {}

    def check_head(self, request: Request) -> Refusal | None:
        """Returns the refusal that this head alone justifies, so that the body need not be read. Reads caches only."""
        refusal = check_target(request.target)
        if refusal is None:
            try:
                self._authenticator.cached(request)
            except Refusal as failure:
                return failure.with_traceback(None)
        return refusal

    async def __call__(self, request: Request, responder: Responder) -> None:
        response_headers: ResponseHeaders = [(b"x-price-keeper-request-id", self.new_request_id())]
        with (
            _ErrorBoundary(responder, response_headers, self.request_stats) as boundary,
            _PendingCallbacks() as pending,
        ):
            if request.target == b"/credentials":
                return await self._issue_credentials(request, boundary)
            if request.target.partition(b"?")[0] == b"/inference-profiles":
                return await self._list_inference_profiles(request, boundary)

            # 1 and 2: the caller, before any byte of the body is parsed; then what the call asks for.
            route = self._routes.get(request.target) if request.method == b"POST" else None
            if route is not None:
                boundary.operation = route.call.operation.name
            caller = self._authenticator.cached(request)
            if caller is None:
                await switch_to_task()
                caller = await self._authenticator.load(request)

            parsed_call = (
                await run_in_thread_if_large(request.body, parse_call, request) if route is None else route.call
            )
            boundary.operation = parsed_call.operation.name
            headers = select_upstream_headers(request, self._simulated_prefix)
            if request.observer is not None:
                request.observer.on_authenticated(caller)
                pending.add(request.observer)
            if route is None:
                route = await self._find_route(request, caller, parsed_call)

            # 3: a retry of a call that is under way, or has just succeeded, shares its response.
            key = compute_retry_key(request, caller, headers)
            if key is not None:
                if self.retry_joiner.join(key, responder):
                    return None
                responder = boundary.share(self.retry_joiner.open_shared(key, responder))

            # 4: rate limits. From here on something is reserved, and `pending` releases it if the call is never sent.
            tokens = 0 if route.pricing is None else route.pricing.estimate_tokens(len(request.body))
            limits = self._rate_limiter.cached_limits(caller)
            if limits is None or limits.buckets:
                reservation = (
                    None if limits is None else self._rate_limiter.reserve_cached(limits, tokens, response_headers)
                )
                if reservation is None:
                    await switch_to_task()
                    reservation = await self._rate_limiter.reserve(
                        caller, tokens, response_headers, is_demand_counted=limits is not None
                    )
                pending.add(reservation)

            # 5: the label that serves. Under a hard budget this reserves the most that the call can cost.
            selector = route.selector
            selection = (
                selector.select_cached(caller, route, request, response_headers)
                if selector is self._label_selector
                else None
            )
            if selection is None:
                await switch_to_task()
                selection = await selector.select(
                    caller, route.call, request, route.resolved, route.pricing, response_headers
                )
                pending.add(selection.reservation)
            await self._send(request, caller, selection, headers, responder, response_headers, pending)
        return None

    async def _find_route(self, request: Request, caller: Caller, parsed_call: ParsedCall) -> CallRoute:
        """Resolve the model that the caller named, and the prices of the call. Caches routes of configured labels."""
        resolved = self._label_selector.resolve_configured(parsed_call.model) if parsed_call.model else None
        is_shared_by_callers = (
            resolved is not None and request.target.startswith(_MODEL_PATH_PREFIX) and request.method == b"POST"
        )
        if resolved is None:
            await switch_to_task()
            resolved = await self._label_selector.resolve(caller, parsed_call)
        selector = self._label_selector  # a different one if labels were reloaded during the wait
        pricing = selector.meters.pricing_for(resolved, parsed_call.operation, request.method)
        route = CallRoute(selector, parsed_call, resolved, pricing)
        if is_shared_by_callers and pricing is not None:
            if len(self._routes) >= MAX_ROUTES:
                self._routes.clear()
            self._routes[request.target] = route
        return route

    async def _send(
        self,
        request: Request,
        caller: Caller,
        selection: Selection,
        headers: list[tuple[str, str]],
        responder: Responder,
        response_headers: ResponseHeaders,
        pending: _PendingCallbacks,
    ) -> None:
        """Steps 6 and 7: build the upstream request, open the meter, send once and relay the response."""
        parsed_call, body, operation = selection.call, selection.body, selection.call.operation
        transform_body = _keep_body
        if operation is Operation.CHAT_COMPLETIONS and await run_in_thread_if_large(
            body, chat_stream_usage.needs_usage_option, body
        ):
            request.reserve_copies(1)
            responder, transform_body = (
                chat_stream_usage.UsageEventFilter(responder, is_usage_only_event),
                chat_stream_usage.add_usage_option,
            )
        if parsed_call.model_span is not None:
            request.reserve_copies(1)  # the body in which the label's model replaces the name that the caller used
        if self._adds_request_metadata:
            request.reserve_copies(1)
            identity = request_metadata.build_identity(caller.org, caller.app, selection.resolved.label)
            headers, body = await run_in_thread_if_large(
                body, request_metadata.add_metadata, operation, identity, headers, body
            )
        guardrail_units = 0
        if selection.pricing is not None:
            if len(request.body) < LARGE_BODY_BYTES:
                guardrail_units = guardrail_usage.estimate_request_units(operation, request.headers, request.body)
            else:
                guardrail_units = await run_in_thread_if_large(
                    request.body, guardrail_usage.estimate_request_units, operation, request.headers, request.body
                )
        call = UpstreamCall(
            request.method.decode(),
            "",  # no operation that is forwarded takes a query
            headers,
            lambda model: transform_body(parsed_call.body_with_model(model, body)),
            selection.targets,
            selection.stats,
            request.received_at,
            request.hash_body,
        )
        meter = self._open_meter(caller, selection, len(body), guardrail_units, pending)
        if meter.price_source:
            response_headers.append((b"x-price-keeper-price-source", meter.price_source.encode()))
        try:
            await self._forwarder.forward(call, responder, response_headers, meter)
        finally:
            meter.close()

    def _open_meter(
        self, caller: Caller, selection: Selection, body_bytes: int, guardrail_units: int, pending: _PendingCallbacks
    ) -> CallMeter:
        """Write the call's intent to the journal. From here on its meter calls the completion listeners."""
        if selection.pricing is None or selection.charged is None:
            for listener in pending.hand_over():
                listener.on_completed(None)
            return FREE_METER
        meter = selection.meters.open_meter(
            selection.pricing,
            selection.charged,
            caller,
            selection.targets,
            body_bytes,
            guardrail_units,
            pending.listeners,
            selection.ceiling,
        )
        pending.hand_over()
        return meter

    async def _issue_credentials(self, request: Request, boundary: _ErrorBoundary) -> None:
        boundary.operation = _CREDENTIALS_ENDPOINT
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await switch_to_task()
        await self._credential_issuer.respond(request, boundary.responder, tuple(boundary.response_headers))
        self.request_stats.get_stats(_CREDENTIALS_ENDPOINT, "").count_local_response(200)

    async def _list_inference_profiles(self, request: Request, boundary: _ErrorBoundary) -> None:
        """Claude Code lists inference profiles when it starts; an empty list is enough for it to continue."""
        boundary.operation = _PROFILES_ENDPOINT
        if self._authenticator.cached(request) is None:
            await switch_to_task()
            await self._authenticator.load(request)
        if request.method != b"GET":
            raise UnknownOperation("inference profiles are listed with GET")
        send_json(boundary.responder, {"inferenceProfileSummaries": []}, tuple(boundary.response_headers))
        self.request_stats.get_stats(_PROFILES_ENDPOINT, "").count_local_response(200)


class _ErrorBoundary:
    """Turns an exception into the response. An unexpected one becomes an internal error, with details in the log."""

    __slots__ = ("_request_stats", "_shared", "operation", "responder", "response_headers")

    def __init__(self, responder: Responder, response_headers: ResponseHeaders, request_stats: RequestStats) -> None:
        self.responder = responder
        self.response_headers = response_headers
        self.operation = NONE  # for metrics
        self._request_stats = request_stats
        self._shared: SharedResponse | None = None

    def share(self, shared: SharedResponse) -> SharedResponse:
        """Send the response through `shared` from now on, because retries of the call may share it."""
        self.responder = self._shared = shared
        return shared

    def __enter__(self) -> _ErrorBoundary:
        return self

    def __exit__(self, _: type[BaseException] | None, failure: BaseException | None, __: TracebackType | None) -> bool:
        try:
            if not isinstance(failure, Exception):
                return False
            label = next((value.decode() for name, value in self.response_headers if name == LABEL_HEADER), "")
            refusal = send_error(self.responder, self.response_headers, failure)
            self._request_stats.count_refusal(refusal, self._request_stats.get_stats(self.operation, label))
            return True
        finally:
            if self._shared is not None:
                self._shared.abort()  # without a complete response by now, no retry may wait for one


class _PendingCallbacks:
    """The completion listeners of a call until its meter takes them over. Cancels them if that never happens."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: tuple[CancellableListener, ...] = ()

    def add(self, listener: CancellableListener | None) -> None:
        if listener is not None:
            self.listeners = (*self.listeners, listener)

    def hand_over(self) -> tuple[CancellableListener, ...]:
        listeners, self.listeners = self.listeners, ()
        return listeners

    def __enter__(self) -> _PendingCallbacks:
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self.listeners:
            listener.on_cancelled()


def _keep_body(body: bytes) -> bytes:
    return body
