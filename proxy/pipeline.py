"""One request, from its first byte to its last, through the rooms in order: START HERE.

    identify -> select -> forward

Admission, metering and recording are rooms yet to be built; an answer is watched on its way (`Tap`), not yet counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from itertools import count

from proxy.answers import answer_json, refuse
from proxy.auth.container import ContainerCredentials
from proxy.auth.identify import Identify
from proxy.errors import Refusal, UnknownOperation
from proxy.exchange import Header, Request, Responder
from proxy.forwarding import request_metadata
from proxy.forwarding.forwarder import Call, Forwarder, Target
from proxy.forwarding.joining import Joining
from proxy.forwarding.relay import Tap
from proxy.model import Caller
from proxy.selection.labels import Choice, Labels
from proxy.surface.calls import Asked, headers_upstream, understood

INVOCATION = b"amz-sdk-invocation-id"

# From a choice to the places that can carry it out; the path is the operation's, for the model of each.
Targets = Callable[[Choice, Asked], list[Target]]


class Pipeline:
    def __init__(
        self,
        identify: Identify,
        labels: Labels,
        targets: Targets,
        forwarder: Forwarder,
        joining: Joining,
        new_tap: Callable[[], Tap],
        credentials: ContainerCredentials,
        simulated_prefix: bytes | None,
        tells_who_calls: bool,
    ) -> None:
        self._identify = identify
        self._labels = labels
        self._targets = targets
        self._forwarder = forwarder
        self._joining = joining
        self._new_tap = new_tap
        self._credentials = credentials
        self._simulated_prefix = simulated_prefix
        self._tells_who_calls = tells_who_calls
        self._run = os.urandom(6).hex()
        self._numbers = count(1)

    async def __call__(self, request: Request, responder: Responder) -> None:
        request_id = (b"x-price-keeper-request-id", f"{self._run}-{next(self._numbers)}".encode())
        try:
            if request.target == b"/credentials":
                await self._hand_out_credentials(request, responder)
            elif request.target.startswith(b"/inference-profiles"):
                # Claude Code asks for them at its start; there are none to show, and it goes on.
                self._identify(request)
                answer_json(responder, {"inferenceProfileSummaries": []}, (request_id,))
            else:
                await self._serve(request, responder, request_id)
        except Refusal as refusal:
            refuse(responder, refusal, (request_id,))

    async def _serve(self, request: Request, responder: Responder, request_id: Header) -> None:
        asked = understood(request)
        caller = self._identify(request)
        key = _retry_key(request, caller)
        if key is not None:
            if self._joining.join(key, responder):
                return
            responder = self._joining.share(key, responder)
        try:
            choice = self._labels.choose(asked.model) if asked.model else Choice("", "", "")
            headers, body = headers_upstream(request, self._simulated_prefix), request.body
            if self._tells_who_calls:
                known = request_metadata.identity(caller.org, caller.app, choice.label)
                headers, body = request_metadata.tell(asked.operation, known, headers, body)
            call = Call(
                request.method.decode(),
                asked.query,
                headers,
                lambda model: asked.body_for(model, body),
                self._targets(choice, asked),
            )
            await self._forwarder.forward(call, responder, (request_id, *_decision(choice)), self._new_tap())
        except Refusal as refusal:
            refuse(responder, refusal, (request_id,))

    async def _hand_out_credentials(self, request: Request, responder: Responder) -> None:
        if request.method != b"GET":
            raise UnknownOperation("credentials are fetched with GET")
        await self._credentials.answer(request, responder)


def _retry_key(request: Request, caller: Caller) -> tuple[Caller, bytes, bytes, bytes] | None:
    invocation = request.headers.get(INVOCATION)
    if invocation is None:
        return None
    return caller, request.target, sha256(request.body).digest(), invocation


def _decision(choice: Choice) -> tuple[Header, ...]:
    if not choice.requested:
        return ()
    return (
        (b"x-price-keeper-requested", choice.requested.encode()),
        (b"x-price-keeper-label", choice.label.encode()),
        (b"x-price-keeper-model", choice.model.encode()),
    )
