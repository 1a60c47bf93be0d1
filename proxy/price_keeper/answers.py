"""Answers of our own in the form AWS gives errors, so that an SDK raises what it would raise at Bedrock."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import orjson

from price_keeper.errors import Busy, InternalError, Refusal
from price_keeper.exchange import Header, Responder
from price_keeper.logs import about

_JSON = (b"content-type", b"application/json")
_INTERNAL = "an internal error; the sidecar's log has its cause"
OUT_OF_MEMORY = Busy("the sidecar has no memory left for this request; try again", retry_after=1)
_log = logging.getLogger("price_keeper.answers")
_USELESS_TO_REPEAT = (b"x-should-retry", b"false")  # obeyed by the clients of Anthropic and OpenAI


def refuse(responder: Responder, refusal: Refusal, more: tuple[Header, ...] = ()) -> None:
    """Answers with the error, or breaks off an answer that has begun: never a second answer."""
    if responder.has_started:
        responder.abort()
        return
    body = orjson.dumps({"message": refusal.message})
    responder.start(refusal.status, (*_head(refusal), *more), len(body))
    responder.write(body)
    responder.finish()


def answer_failure(responder: Responder, told: Sequence[Header], failure: Exception) -> Refusal:
    """What it was answered with. Of what was nobody's intention, the log alone says more. `told` begins with the
    request's id."""
    if not isinstance(failure, Refusal):
        number = told[0][1].decode()
        _log.error("request %s failed: %s", number, type(failure).__name__, extra=about(number, failure))
        failure = OUT_OF_MEMORY if isinstance(failure, MemoryError) else InternalError(_INTERNAL)
    refuse(responder, failure, tuple(told))
    return failure


def answer_json(responder: Responder, value: object, more: tuple[Header, ...] = ()) -> None:
    body = orjson.dumps(value)
    responder.start(200, (_JSON, *more), len(body))
    responder.write(body)
    responder.finish()


def _head(refusal: Refusal) -> tuple[Header, ...]:
    head: tuple[Header, ...] = (_JSON, (b"x-amzn-errortype", refusal.error_type.encode()))
    if refusal.retry_after is None:
        return (*head, _USELESS_TO_REPEAT) if refusal.status < 500 else head
    # Whole seconds for most clients, milliseconds for botocore; never less than the true wait.
    seconds, milliseconds = math.ceil(refusal.retry_after), math.ceil(refusal.retry_after * 1000)
    return (*head, (b"retry-after", b"%d" % seconds), (b"x-amz-retry-after", b"%d" % milliseconds))
