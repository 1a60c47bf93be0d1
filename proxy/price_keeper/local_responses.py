"""Responses that the product writes itself: JSON documents, and errors in the form of the API that was called.

An SDK raises for them what it would raise for an error of its vendor. A response that has begun is aborted instead:
there is never a second one. The text of unexpected exceptions goes nowhere; the log has their type and traceback.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import orjson

from price_keeper.errors import Busy, InternalError, Refusal
from price_keeper.exchange import Header, Responder
from price_keeper.telemetry.logs import build_request_extra
from price_keeper.vendor_apis import ApiForm, build_error_document

_JSON = (b"content-type", b"application/json")
_INTERNAL_ERROR_MESSAGE = "an internal error; the sidecar's log has its cause"
OUT_OF_MEMORY = Busy("the sidecar has no memory left for this request; try again", retry_after=1)
_log = logging.getLogger("price_keeper.answers")
_DO_NOT_RETRY = (b"x-should-retry", b"false")  # obeyed by the clients of Anthropic and OpenAI


def send_refusal(
    responder: Responder, refusal: Refusal, extra_headers: tuple[Header, ...] = (), form: ApiForm = ApiForm.AWS
) -> None:
    """Responds with the error, or aborts a response that has begun, because a request gets one response only."""
    if responder.has_started:
        responder.abort()
        return
    document = build_error_document(form, refusal.status, refusal.error_type, refusal.message)
    if refusal.details is not None:
        document["details"] = refusal.details
    body = orjson.dumps(document)
    responder.start(refusal.status, (*_build_error_headers(refusal), *extra_headers), len(body))
    responder.write(body)
    responder.finish()


def send_error(
    responder: Responder, response_headers: Sequence[Header], failure: Exception, form: ApiForm = ApiForm.AWS
) -> Refusal:
    """Respond to a request whose handler raised `failure`, and return the refusal that was sent. An exception that is
    no Refusal is logged, and the response says only that there was an internal error, or no memory. The first of
    `response_headers` must be the request's id."""
    if not isinstance(failure, Refusal):
        request_id = response_headers[0][1].decode()
        _log.error(
            "request %s failed: %s", request_id, type(failure).__name__, extra=build_request_extra(request_id, failure)
        )
        failure = OUT_OF_MEMORY if isinstance(failure, MemoryError) else InternalError(_INTERNAL_ERROR_MESSAGE)
    send_refusal(responder, failure, tuple(response_headers), form)
    return failure


def send_json(responder: Responder, value: object, extra_headers: tuple[Header, ...] = ()) -> None:
    body = orjson.dumps(value)
    responder.start(200, (_JSON, *extra_headers), len(body))
    responder.write(body)
    responder.finish()


def _build_error_headers(refusal: Refusal) -> tuple[Header, ...]:
    head: tuple[Header, ...] = (_JSON, (b"x-amzn-errortype", refusal.error_type.encode()))
    if refusal.retry_after is None:
        return (*head, _DO_NOT_RETRY) if refusal.status < 500 else head
    # Whole seconds for most clients, milliseconds for botocore; never less than the true wait.
    seconds, milliseconds = math.ceil(refusal.retry_after), math.ceil(refusal.retry_after * 1000)
    return (*head, (b"retry-after", b"%d" % seconds), (b"x-amz-retry-after", b"%d" % milliseconds))
