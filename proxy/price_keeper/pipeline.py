"""One request, from its first byte to its last, through the rooms in order: START HERE.

    identify -> admit -> select -> forward -> meter -> record

Admission is by the caller's limits, and by whether what a call costs could be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol

from price_keeper.answers import answer_failure, answer_json
from price_keeper.auth.container import HandsOut
from price_keeper.auth.identify import Identify
from price_keeper.choosing import LABEL_TOLD, Choosing, Chosen, Told, off_the_loop
from price_keeper.errors import Refusal, UnknownOperation
from price_keeper.exchange import AtOnce, Request, Responder, request_ids
from price_keeper.express import Express
from price_keeper.forwarding import chat_usage, request_metadata
from price_keeper.forwarding.forwarder import Call, Forwarder
from price_keeper.forwarding.joining import Joining
from price_keeper.forwarding.model_path import Operation
from price_keeper.metering import guardrails
from price_keeper.metering.streams import usage_event_only
from price_keeper.model import Caller
from price_keeper.recording.entries import Ended
from price_keeper.recording.metering import FREE_OF_CHARGE, Metered
from price_keeper.selection.admitting import Admitting
from price_keeper.surface.calls import Asked, Headers, headers_upstream, refused_at_head, retry_key, understood
from price_keeper.traffic import NONE, Traffic

# What is no operation of Bedrock's, and is asked for here all the same.
_CREDENTIALS, _PROFILES = "credentials", "inference_profiles"


class Waiting(Ended, Protocol):
    """For one call's end."""

    def close(self) -> None:
        """It was never sent."""


class Pipeline:
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
        once: Callable[[Coroutine[Any, Any, None]], None],
        traffic: Traffic,
    ) -> None:
        """`once` runs what has to wait, of calls that did not have to at first."""
        self._identify = identify
        self._admitting = admitting
        self._choosing = choosing
        self._forwarder = forwarder
        self.joining = joining
        self._credentials = credentials
        self._simulated_prefix = simulated_prefix
        self._tells_who_calls = tells_who_calls
        self.traffic = traffic
        self.new_request_id = request_ids()
        self._express = Express(
            identify,
            admitting,
            choosing,
            forwarder,
            joining,
            simulated_prefix,
            self.new_request_id,
            self._wait_for_limits,
            once,
            traffic,
        )
        # Takes the calls that nobody has to be asked for first.
        self.at_once: AtOnce | None = None if tells_who_calls else self._express

    @property
    def choosing(self) -> Choosing:
        return self._choosing

    def take_on(self, choosing: Choosing) -> None:
        """That of another configuration, for all that is not chosen yet."""
        before, self._choosing = self._choosing, choosing
        before.successor = choosing
        self._express.take_on(choosing)

    def refused_at_head(self, request: Request) -> Refusal | None:
        """Why it is no use to hear the body. Nobody is asked: who may call is found out when it is whole."""
        refusal = refused_at_head(request.target)
        if refusal is None:
            try:
                self._identify.known(request)
            except Refusal as failure:
                return failure.with_traceback(None)
        return refusal

    async def __call__(self, request: Request, responder: Responder) -> None:
        told: Told = [(b"x-price-keeper-request-id", self.new_request_id())]
        if request.target == b"/credentials":
            with self._answering(responder, told, _CREDENTIALS):
                await self._hand_out_credentials(request, responder, told)
        elif request.target.partition(b"?")[0] == b"/inference-profiles":
            with self._answering(responder, told, _PROFILES):
                await self._show_no_profiles(request, responder, told)
        else:
            with self._answering(responder, told, NONE):
                await self._serve(request, responder, told)

    def _answering(self, responder: Responder, told: Told, operation: str) -> _Answering:
        return _Answering(responder, told, self.traffic, operation)

    async def _serve(self, request: Request, responder: Responder, told: Told) -> None:
        caller = self._identify.known(request) or await self._identify.learned(request)
        asked = await off_the_loop(request.body, understood, request)
        headers = headers_upstream(request, self._simulated_prefix)
        if request.hearing is not None:
            request.hearing.comes_from(caller)
        with self._answering(responder, told, asked.operation.name):
            await self._share(request, caller, asked, headers, responder, told)

    async def _wait_for_limits(
        self, request: Request, caller: Caller, asked: Asked, headers: Headers, responder: Responder, told: Told
    ) -> None:
        with self._answering(responder, told, asked.operation.name):
            await self._share(request, caller, asked, headers, responder, told, is_counted=True)

    async def _share(
        self,
        request: Request,
        caller: Caller,
        asked: Asked,
        headers: Headers,
        responder: Responder,
        told: Told,
        *,
        is_counted: bool = False,
    ) -> None:
        """`is_counted`: the caller's limits know of this call, and have not enough for it here."""
        key = retry_key(request, caller, headers)
        if key is None:
            await self._carry_out(request, caller, asked, headers, responder, told, is_counted)
        elif not self.joining.join(key, responder):
            shared = self.joining.share(key, responder)
            try:
                with self._answering(shared, told, asked.operation.name):
                    await self._carry_out(request, caller, asked, headers, shared, told, is_counted)
            finally:
                shared.abort()  # whatever became of the call: if it has no answer by now, nobody is to wait for one

    async def _carry_out(
        self,
        request: Request,
        caller: Caller,
        asked: Asked,
        headers: Headers,
        responder: Responder,
        told: Told,
        is_counted: bool,
    ) -> None:
        choice = await self._choosing.named(caller, asked)
        choosing = self._choosing  # which is another one if labels were taken on meanwhile
        terms = choosing.metering.terms(choice, asked.operation, request.method)
        tokens = 0 if terms is None else terms.tokens(len(request.body))
        with _Open() as waiting:
            waiting.add(request.hearing)
            waiting.add(await self._admitting.admitted(caller, tokens, told, is_counted=is_counted))
            chosen = await choosing.chosen(caller, asked, request, choice, terms, told)
            waiting.add(chosen.held)
            await self._send(request, caller, chosen, headers, responder, told, waiting)

    async def _send(
        self,
        request: Request,
        caller: Caller,
        chosen: Chosen,
        headers: Headers,
        responder: Responder,
        told: Told,
        waiting: _Open,
    ) -> None:
        asked, body, operation = chosen.asked, chosen.body, chosen.asked.operation
        to_be_sent = _as_it_is
        if operation is Operation.CHAT_COMPLETIONS and await off_the_loop(body, chat_usage.is_to_be_asked, body):
            request.count_copies(1)
            responder, to_be_sent = chat_usage.WithoutUsage(responder, usage_event_only), chat_usage.with_usage_asked
        if asked.named_at is not None:
            request.count_copies(1)  # with the name of its label's model in it
        if self._tells_who_calls:
            request.count_copies(1)
            known = request_metadata.identity(caller.org, caller.app, chosen.choice.label)
            headers, body = await off_the_loop(body, request_metadata.tell, operation, known, headers, body)
        call = Call(
            request.method.decode(),
            "",  # no operation that gets so far takes a query
            headers,
            lambda model: to_be_sent(asked.body_for(model, body)),
            chosen.targets,
            self.traffic.lane(operation.name, chosen.terms.counted_as if chosen.terms else chosen.choice.label),
            request.taken_at,
        )
        meter = await self._meter(request, caller, chosen, len(body), waiting)
        if meter.price_source:
            told.append((b"x-price-keeper-price-source", meter.price_source.encode()))
        try:
            await self._forwarder.forward(call, responder, tuple(told), meter)
        finally:
            meter.close()

    async def _meter(
        self, request: Request, caller: Caller, chosen: Chosen, body_bytes: int, waiting: _Open
    ) -> Metered:
        """From here on it is the meter that tells what becomes of the call, and not before it is written down."""
        if chosen.terms is None or chosen.account is None:
            for each in waiting.handed_over():
                each.ended(None)
            return FREE_OF_CHARGE
        body = request.body
        units = await off_the_loop(body, guardrails.units_asked, chosen.asked.operation, request.headers, body)
        meter = chosen.metering.meter(
            chosen.terms, chosen.account, caller, chosen.targets, body_bytes, units, waiting.all, chosen.worst
        )
        waiting.handed_over()
        return meter

    async def _hand_out_credentials(self, request: Request, responder: Responder, told: Told) -> None:
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await self._credentials.answer(request, responder, tuple(told))
        self.traffic.lane(_CREDENTIALS, "").answered_here(200)

    async def _show_no_profiles(self, request: Request, responder: Responder, told: Told) -> None:
        """Claude Code asks for inference profiles at its start; there are none to show, and it goes on."""
        _ = self._identify.known(request) or await self._identify.learned(request)
        if request.method != b"GET":
            raise UnknownOperation("inference profiles are listed with GET")
        answer_json(responder, {"inferenceProfileSummaries": []}, tuple(told))
        self.traffic.lane(_PROFILES, "").answered_here(200)


class _Answering:
    """Whatever is raised inside is answered; of what was nobody's intention, the log alone says more."""

    __slots__ = ("_operation", "_responder", "_told", "_traffic")

    def __init__(self, responder: Responder, told: Told, traffic: Traffic, operation: str) -> None:
        self._responder = responder
        self._told = told
        self._traffic = traffic
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, failure: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(failure, Exception):
            return False
        label = next((value.decode() for name, value in self._told if name == LABEL_TOLD), "")
        refusal = answer_failure(self._responder, self._told, failure)
        self._traffic.refuses(refusal, self._traffic.lane(self._operation, label))
        return True


class _Open:
    """What hears of a call's end, and is told at once that there was none if the call comes to nothing before it is
    sent."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Waiting, ...] = ()

    def add(self, each: Waiting | None) -> None:
        if each is not None:
            self.all = (*self.all, each)

    def handed_over(self) -> tuple[Waiting, ...]:
        every, self.all = self.all, ()
        return every

    def __enter__(self) -> _Open:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.all:
            each.close()


def _as_it_is(body: bytes) -> bytes:
    return body
