"""One request, from its first byte to its last, through the rooms in order: START HERE.

    identify -> admit -> select -> forward -> meter -> record

Admission is as yet only whether what a call costs could be recorded; limits are to come.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from types import TracebackType
from typing import ParamSpec, TypeAlias, TypeVar

from proxy.answers import answer_json, refuse
from proxy.auth.container import HandsOut
from proxy.auth.identify import Identify
from proxy.errors import OurFault, QuotaSpent, Refusal, UnknownOperation
from proxy.exchange import Header, Request, Responder
from proxy.forwarding import chat_usage, request_metadata
from proxy.forwarding.forwarder import Call, Forwarder, Target
from proxy.forwarding.joining import Joining
from proxy.forwarding.model_path import Operation
from proxy.metering import guardrails
from proxy.metering.profiles import OwnChoice
from proxy.metering.streams import usage_event_only
from proxy.model import Caller, Choice
from proxy.recording.entries import Account
from proxy.recording.meter import Terms
from proxy.recording.metering import FREE_OF_CHARGE, Metered, Metering
from proxy.selection.labels import Labels
from proxy.selection.serving import EXCEEDED, SPECIFIC, decision_told
from proxy.selection.standings import Standings
from proxy.surface.calls import Asked, headers_upstream, understood

INVOCATION = b"amz-sdk-invocation-id"
TELLING = ("accept", "content-type", "x-amzn-bedrock-")  # headers that change the answer
LARGE_BYTES = 256 * 1024  # of a body, which takes milliseconds to look into

# From a choice to the places that can carry it out; the path is the operation's, for the model of each.
Targets = Callable[[Choice, Asked], list[Target]]

Headers: TypeAlias = "list[tuple[str, str]]"
Told: TypeAlias = "list[Header]"  # the headers of our own that the answer gets, more of them with every room

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("proxy.pipeline")


class Pipeline:
    def __init__(
        self,
        identify: Identify,
        admit: Callable[[], None],
        labels: Labels,
        standings: Standings,
        targets: Targets,
        forwarder: Forwarder,
        joining: Joining,
        metering: Metering,
        credentials: HandsOut,
        simulated_prefix: bytes | None,
        tells_who_calls: bool,
    ) -> None:
        self._identify = identify
        self._admit = admit
        self._labels = labels
        self._standings = standings
        self._targets = targets
        self._forwarder = forwarder
        self._joining = joining
        self._metering = metering
        self._credentials = credentials
        self._simulated_prefix = simulated_prefix
        self._tells_who_calls = tells_who_calls
        self._run = os.urandom(6).hex()
        self._numbers = count(1)

    def new_request_id(self) -> bytes:
        """Each new in this process, and in all likelihood among all."""
        return f"{self._run}-{next(self._numbers)}".encode()

    async def __call__(self, request: Request, responder: Responder) -> None:
        told: Told = [(b"x-price-keeper-request-id", self.new_request_id())]
        with _Answering(responder, told):
            if request.target == b"/credentials":
                await self._hand_out_credentials(request, responder, told)
            elif request.target.partition(b"?")[0] == b"/inference-profiles":
                await self._show_no_profiles(request, responder, told)
            else:
                await self._serve(request, responder, told)

    async def _serve(self, request: Request, responder: Responder, told: Told) -> None:
        caller = self._identify.known(request) or await self._identify.learned(request)
        asked = await _off_the_loop(request.body, understood, request)
        headers = headers_upstream(request, self._simulated_prefix)
        key = _retry_key(request, caller, headers)
        if key is None:
            await self._carry_out(request, caller, asked, headers, responder, told)
        elif not self._joining.join(key, responder):
            shared = self._joining.share(key, responder)
            try:
                with _Answering(shared, told):
                    await self._carry_out(request, caller, asked, headers, shared, told)
            finally:
                shared.abort()  # whatever became of the call: if it has no answer by now, nobody is to wait for one

    async def _carry_out(
        self, request: Request, caller: Caller, asked: Asked, headers: Headers, responder: Responder, told: Told
    ) -> None:
        choice, account, terms = await self._selected(caller, asked, request.method, told)
        targets, body = self._targets(choice, asked), request.body
        to_be_sent = _as_it_is
        if asked.operation is Operation.CHAT_COMPLETIONS and await _off_the_loop(body, chat_usage.is_to_be_asked, body):
            responder, to_be_sent = chat_usage.WithoutUsage(responder, usage_event_only), chat_usage.with_usage_asked
        if self._tells_who_calls:
            known = request_metadata.identity(caller.org, caller.app, choice.label)
            tell = request_metadata.tell
            headers, body = await _off_the_loop(body, tell, asked.operation, known, headers, body)
        call = Call(
            request.method.decode(),
            "",  # no operation that gets so far takes a query
            headers,
            lambda model: to_be_sent(asked.body_for(model, body)),
            targets,
        )
        meter: Metered = FREE_OF_CHARGE
        if terms is not None and account is not None:
            units = await _off_the_loop(body, guardrails.units_asked, asked.operation, request.headers, body)
            meter = self._metering.meter(terms, account, caller, targets, len(body), units)
            told.append((b"x-price-keeper-price-source", meter.price_source.encode()))
        try:
            await self._forwarder.forward(call, responder, tuple(told), meter)
        finally:
            meter.close()

    async def _selected(
        self, caller: Caller, asked: Asked, method: bytes, told: Told
    ) -> tuple[Choice, Account | None, Terms | None]:
        """What serves the call, who pays for it and on which terms. What costs nothing needs no budget."""
        choice = self._labels.configured(asked.model) if asked.model else Choice("", "", "")
        if choice is None:
            choice = self._labels.choose(asked.model, await self._standings.own_labels.of(caller))
        terms = self._metering.terms(choice, asked.operation, method)
        if terms is None:
            told += _choice_told(choice)
            return choice, None, None
        self._admit()
        payer = self._standings.known(caller) or await self._standings.learned(caller)
        try:
            if terms.counted_as != choice.label:
                decision = payer.standing.allows(terms.counted_as)
            elif type(choice) is OwnChoice:
                decision = payer.standing.decide_own(choice.label, asked.operation in SPECIFIC)
            else:
                decision = payer.standing.decide(choice.label, asked.operation in SPECIFIC)
        except Refusal as refusal:
            told += (*_choice_told(choice)[:1], *([EXCEEDED] if isinstance(refusal, QuotaSpent) else []))
            raise
        if decision.label not in (choice.label, terms.counted_as):
            choice = self._labels.instead_of(choice, decision.label, payer.standing.own)
            terms = self._metering.terms(choice, asked.operation, method) or terms
        told += (*_choice_told(choice), *decision_told(decision))
        return choice, payer.account(terms.counted_as), terms

    async def _hand_out_credentials(self, request: Request, responder: Responder, told: Told) -> None:
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await self._credentials.answer(request, responder, tuple(told))

    async def _show_no_profiles(self, request: Request, responder: Responder, told: Told) -> None:
        """Claude Code asks for inference profiles at its start; there are none to show, and it goes on."""
        _ = self._identify.known(request) or await self._identify.learned(request)
        if request.method != b"GET":
            raise UnknownOperation("inference profiles are listed with GET")
        answer_json(responder, {"inferenceProfileSummaries": []}, tuple(told))


class _Answering:
    """Whatever is raised inside is answered; of what was nobody's intention, the log alone says more."""

    __slots__ = ("_responder", "_told")

    def __init__(self, responder: Responder, told: Told) -> None:
        self._responder = responder
        self._told = told

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, _: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(failure, Exception):
            return False
        if not isinstance(failure, Refusal):
            # Its message is left out, as it could hold a piece of what the caller sent.
            where, number = "".join(traceback.format_tb(trace)), self._told[0][1].decode()
            _log.error("request %s failed: %s\n%s", number, type(failure).__name__, where)
            failure = OurFault("an internal error; the sidecar's log has its cause")
        refuse(self._responder, failure, tuple(self._told))
        return True


async def _off_the_loop(body: bytes, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """In a thread if the body is large, as looking into it would keep everybody waiting."""
    if len(body) < LARGE_BYTES:
        return work(*arguments, **named)
    return await asyncio.to_thread(work, *arguments, **named)


def _as_it_is(body: bytes) -> bytes:
    return body


def _retry_key(request: Request, caller: Caller, headers: Headers) -> bytes | None:
    """The same for a call sent again, and for no other call whose answer might be another one."""
    invocation = request.headers.get(INVOCATION)
    if invocation is None:
        return None
    telling = sorted([header for header in headers if header[0].startswith(TELLING)])
    whole = repr((caller.client_id, request.method, request.target, invocation, telling)).encode()
    return sha256(whole + sha256(request.body).digest()).digest()


def _choice_told(choice: Choice) -> tuple[Header, ...]:
    if not choice.requested:
        return ()
    return (
        (b"x-price-keeper-requested", choice.requested.encode()),
        (b"x-price-keeper-label", choice.label.encode()),
        (b"x-price-keeper-model", choice.model.encode()),
    )
