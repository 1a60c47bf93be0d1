"""Every request to the data port, from its first byte to its last: START HERE.

    authenticate -> parse -> join a retry -> reserve rate limits -> select a label -> meter -> forward

`RequestHandler.__call__` is one coroutine; every request runs it, over HTTP/1.1 and HTTP/2 alike. `Tasks.spawn_eager`
runs it without a task. With warm caches it waits once: for the end of the response. Code that may do I/O comes after
`await switch_to_task()`, because `asyncio.timeout` works only inside a task. Every reservation is settled or released
once, whatever is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from price_keeper.anthropic_messages import MessagesResponder, is_messages_path, to_invocation
from price_keeper.auth.authenticate import Authenticator
from price_keeper.auth.container_credentials import CredentialIssuer
from price_keeper.budgets.label_selector import (
    LABEL_HEADER,
    LARGE_BODY_BYTES,
    CallRoute,
    LabelSelector,
    ResponseHeaders,
    run_in_thread_if_large,
)
from price_keeper.domain import Caller
from price_keeper.errors import InvalidRequest, NotFound, Refusal, UnknownOperation
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
from price_keeper.usage.unit_usage import NO_UNITS, read_request
from price_keeper.vendor_apis import (
    COUNT_TOKENS,
    VENDOR_PREFIXES,
    ApiForm,
    build_model,
    build_model_list,
    find_form,
    find_listed_model,
    replace_alias,
)

# Local endpoints, used as metric labels.
_CREDENTIALS_ENDPOINT, _PROFILES_ENDPOINT, _MODELS_ENDPOINT = "credentials", "inference_profiles", "models"

_MODEL_PATH_PREFIX: Final = b"/model/"  # other paths name their model, if at all, in the body
MAX_ROUTES: Final = 1000


class CallOutcomeListener(CompletionListener, Protocol):
    """Called exactly once per call: with its receipt, with None before a call that costs nothing is sent, or because
    the call was never sent."""

    def on_never_sent(self) -> None:
        """Whatever was reserved for the call is released."""


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
        error_responder, counted_as = responder, NONE  # for a response that is an error, and for metrics
        needed_format = ""  # of the label, where the request is written for one family of models
        shared: SharedResponse | None = None
        pending: tuple[CallOutcomeListener, ...] = ()  # to be told of the call's end, unless its meter takes them over
        try:
            try:
                if not request.target.startswith(_MODEL_PATH_PREFIX):  # as that of nearly every call does
                    if request.target == b"/credentials":
                        counted_as = _CREDENTIALS_ENDPOINT
                        return await self._issue_credentials(request, responder, response_headers)
                    if request.target.partition(b"?")[0] == b"/inference-profiles":
                        counted_as = _PROFILES_ENDPOINT
                        return await self._list_inference_profiles(request, responder, response_headers)

                    if request.target.startswith(VENDOR_PREFIXES):
                        form = find_form(request)
                        request.target = replace_alias(form, request.target)
                        path = request.target.partition(b"?")[0]
                        if request.method == b"GET" and (model := find_listed_model(path)) is not None:
                            counted_as = _MODELS_ENDPOINT
                            return await self._list_models(request, responder, response_headers, form, model)
                        if is_messages_path(path):
                            await self._authenticate(request)  # before any byte of the body is parsed
                            request.reserve_copies(4 if path == COUNT_TOKENS else 3)
                            request.headers.pop(b"accept", None)  # to InvokeModel, the type of the model's answer
                            request.target, request.body = await run_in_thread_if_large(
                                request.body, to_invocation, request
                            )
                            responder = error_responder = MessagesResponder(responder, is_count=path == COUNT_TOKENS)
                            needed_format = "anthropic"

                # 1 and 2: the caller, before any byte of the body is parsed; then what the call asks for.
                route = self._routes.get(request.target) if request.method == b"POST" else None
                if route is not None:
                    counted_as = route.counted_as
                caller = self._authenticator.cached(request)
                if caller is None:
                    await switch_to_task()
                    caller = await self._authenticator.load(request)

                if route is None:
                    parsed_call = await run_in_thread_if_large(request.body, parse_call, request)
                    counted_as = parsed_call.operation.name
                headers = select_upstream_headers(request, self._simulated_prefix)
                if request.trace is not None:
                    request.trace.on_authenticated(caller)
                    pending = (request.trace,)
                if route is None:
                    route = await self._find_route(request, caller, parsed_call)

                if needed_format and route.pricing is not None and route.pricing.format not in ("", needed_format):
                    raise InvalidRequest(
                        f"the Messages API takes labels of format {needed_format!r}; "
                        f"{route.resolved.label!r} is of format {route.pricing.format!r}"
                    )

                # 3: a retry of a call that is under way, or has just succeeded, shares its response.
                key = compute_retry_key(request, caller, headers)
                if key is not None:
                    if self.retry_joiner.join(key, responder):
                        return None
                    responder = error_responder = shared = self.retry_joiner.open_shared(key, responder)

                # 4: rate limits. From here on something is reserved, and released below if the call is never sent.
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
                    if reservation is not None:
                        pending = (*pending, reservation)

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
                    if selection.reservation is not None:
                        pending = (*pending, selection.reservation)

                # 6: the call as it goes upstream, and its meter, whose intent is in the journal when it is open.
                parsed_call, body, operation = selection.call, selection.body, selection.call.operation
                adds_usage_option = operation is Operation.CHAT_COMPLETIONS and await run_in_thread_if_large(
                    body, chat_stream_usage.needs_usage_option, body
                )
                if adds_usage_option:
                    request.reserve_copies(1)
                    responder = chat_stream_usage.UsageEventFilter(responder, is_usage_only_event)
                if parsed_call.model_span is not None:
                    request.reserve_copies(1)  # the body in which the label's model replaces the caller's name for it
                if self._adds_request_metadata:
                    request.reserve_copies(1)
                    identity = request_metadata.build_identity(caller.org, caller.app, selection.resolved.label)
                    headers, body = await run_in_thread_if_large(
                        body, request_metadata.add_metadata, operation, identity, headers, body
                    )
                guardrail_units = 0
                if selection.pricing is not None:
                    if len(request.body) < LARGE_BODY_BYTES:
                        guardrail_units = guardrail_usage.estimate_request_units(
                            operation, request.headers, request.body
                        )
                    else:
                        guardrail_units = await run_in_thread_if_large(
                            request.body,
                            guardrail_usage.estimate_request_units,
                            operation,
                            request.headers,
                            request.body,
                        )
                requested_units = NO_UNITS
                if selection.pricing is not None and selection.pricing.sold_units:
                    requested_units = await run_in_thread_if_large(
                        request.body,
                        read_request,
                        operation,
                        request.body,
                        selection.pricing.sold_units,
                        are_tokens_free=selection.pricing.are_tokens_free,
                    )
                call = UpstreamCall(
                    request.method.decode(),
                    "",  # no operation that is forwarded takes a query
                    headers,
                    _build_body_source(parsed_call, body, adds_usage_option),
                    selection.targets,
                    selection.stats,
                    request.received_at,
                    request.hash_body,
                )
                meter: CallMeter = FREE_METER
                if selection.pricing is not None and selection.charged is not None:
                    meter = selection.meters.open_meter(
                        selection.pricing,
                        selection.charged,
                        caller,
                        selection.targets,
                        len(body),
                        guardrail_units,
                        pending,
                        selection.ceiling,
                        requested_units,
                    )
                    pending = ()
                else:
                    completed, pending = pending, ()
                    for listener in completed:
                        listener.on_completed(None)

                # 7: send once, and relay the response.
                try:
                    if price_source := meter.price_source:
                        response_headers.append((b"x-price-keeper-price-source", price_source.encode()))
                    await self._forwarder.forward(call, responder, response_headers, meter)
                finally:
                    meter.close()
            finally:
                for listener in pending:
                    listener.on_never_sent()
        except Exception as failure:
            self._respond_with_error(request, error_responder, response_headers, failure, counted_as)
        finally:
            if shared is not None:
                shared.abort()  # without a complete response by now, no retry may wait for one
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

    async def _authenticate(self, request: Request) -> Caller:
        caller = self._authenticator.cached(request)
        if caller is None:
            await switch_to_task()
            caller = await self._authenticator.load(request)
        return caller

    def _respond_with_error(
        self,
        request: Request,
        responder: Responder,
        response_headers: ResponseHeaders,
        failure: Exception,
        operation: str,
    ) -> None:
        """An unexpected exception becomes an internal error, with details in the log."""
        label = next((value.decode() for name, value in response_headers if name == LABEL_HEADER), "")
        refusal = send_error(responder, response_headers, failure, find_form(request))
        self.request_stats.count_refusal(refusal, self.request_stats.get_stats(operation, label))

    async def _issue_credentials(
        self, request: Request, responder: Responder, response_headers: ResponseHeaders
    ) -> None:
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await switch_to_task()
        await self._credential_issuer.respond(request, responder, tuple(response_headers))
        self.request_stats.get_stats(_CREDENTIALS_ENDPOINT, "").count_local_response(200)

    async def _list_inference_profiles(
        self, request: Request, responder: Responder, response_headers: ResponseHeaders
    ) -> None:
        """Claude Code lists inference profiles when it starts; an empty list is enough for it to continue."""
        await self._authenticate(request)
        if request.method != b"GET":
            raise UnknownOperation("inference profiles are listed with GET")
        send_json(responder, {"inferenceProfileSummaries": []}, tuple(response_headers))
        self.request_stats.get_stats(_PROFILES_ENDPOINT, "").count_local_response(200)

    async def _list_models(
        self, request: Request, responder: Responder, response_headers: ResponseHeaders, form: ApiForm, model: str
    ) -> None:
        """The labels that this caller may use, or one of them, as models of the vendor's API."""
        caller = await self._authenticate(request)
        await switch_to_task()
        names = await self._label_selector.list_labels(caller)
        if model and model not in names:
            raise NotFound(f"there is no label {model[:200]!r}; there are {', '.join(names)}")
        document = build_model(form, model) if model else build_model_list(form, names)
        send_json(responder, document, tuple(response_headers))
        self.request_stats.get_stats(_MODELS_ENDPOINT, "").count_local_response(200)


def _build_body_source(parsed_call: ParsedCall, body: bytes, adds_usage_option: bool) -> Callable[[str], bytes]:
    """The body that is sent, by the model of the target."""
    if adds_usage_option:
        return lambda model: chat_stream_usage.add_usage_option(parsed_call.body_with_model(model, body))
    if parsed_call.model_span is not None:
        return lambda model: parsed_call.body_with_model(model, body)
    return lambda _: body
