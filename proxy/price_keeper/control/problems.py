"""What goes wrong in the control API, in the one form in which it is told."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from price_keeper.control.terms import LONGEST_NAME
from price_keeper.errors import ConfigError, PriceKeeperError, Refusal, InvalidStoreRequest, StoreError
from price_keeper.logs import build_request_extra
from price_keeper.selection.settings import InvalidSettings

STORE_SECONDS = 5  # after which the store may be back
MOST_MISTAKES = 20  # told at once: whoever made more has not written this for us

ERRORS: Mapping[int, str] = {
    400: "invalid_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    412: "precondition_failed",
    413: "too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
    429: "too_many_requests",
    500: "internal_error",
    503: "unavailable",
}

_log = logging.getLogger("price_keeper.control")


class Problem(PriceKeeperError):
    """`details` say where the mistakes are: the path in the body or the query, and what is wrong there."""

    def __init__(
        self,
        status: int,
        error: str,
        message: str,
        details: Sequence[tuple[str, str]] = (),
        *,
        wait: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.error = error
        self.message = message
        self.details = tuple(details)
        self.headers = dict(headers or {})
        if wait is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(wait)))
        super().__init__(message)

    def body(self, request_id: str, now: float) -> dict[str, Any]:
        return {
            "error": self.error,
            "message": self.message,
            "details": [{"path": path, "message": message} for path, message in self.details],
            "timestamp": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "request_id": request_id,
        }


def invalid(message: str, *details: tuple[str, str]) -> Problem:
    more = [("", f"and {len(details) - MOST_MISTAKES} more mistakes")] * (len(details) > MOST_MISTAKES)
    return Problem(400, ERRORS[400], message, [*details[:MOST_MISTAKES], *more])


def not_found(message: str) -> Problem:
    return Problem(404, ERRORS[404], message)


def unauthorized(message: str) -> Problem:
    return Problem(401, ERRORS[401], message, headers={"WWW-Authenticate": 'Bearer realm="price-keeper"'})


def forbidden(message: str) -> Problem:
    return Problem(403, ERRORS[403], message)


def too_many(message: str, wait: float) -> Problem:
    return Problem(429, ERRORS[429], message, wait=wait)


def problem_of(failure: Exception, request_id: str) -> Problem:
    """What may be told of a failure. The cause of one that is ours stands in the log alone."""
    match failure:
        case Problem():
            return failure
        case InvalidSettings():
            details = [(".".join(part[:LONGEST_NAME] for part in path), told) for path, told in failure.mistakes]
            return invalid("the settings cannot be used", *details)
        case ConfigError():
            return invalid("this cannot be done", *((_path(line), _complaint(line)) for line in failure.problems))
        case Refusal():
            error = ERRORS.get(failure.status, ERRORS[400])
            return Problem(failure.status, error, failure.message, wait=failure.retry_after)
        case StoreError() if not isinstance(failure, InvalidStoreRequest):
            _log.warning("request %s: the store: %s", request_id, failure, extra=build_request_extra(request_id))
            return Problem(503, ERRORS[503], "the store that keeps this is away", wait=STORE_SECONDS)
    _log.error("request %s failed: %s", request_id, type(failure).__name__, extra=build_request_extra(request_id, failure))
    return Problem(500, ERRORS[500], "a mistake of ours; the log has its cause under this request id")


def _path(line: str) -> str:
    return line.partition(": ")[0] if ": " in line else ""


def _complaint(line: str) -> str:
    return line.partition(": ")[2] or line
