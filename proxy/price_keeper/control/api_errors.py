"""Errors of the control API: `ApiError`, its JSON form, and the conversion of every other exception into one.

The cause of an internal error is only in the log, under the request id that the caller received.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from price_keeper.budgets.org_settings import InvalidSettings
from price_keeper.control.api_constants import MAX_ECHOED_NAME_LENGTH
from price_keeper.errors import (
    ConfigError,
    InvalidStoreRequest,
    PriceKeeperError,
    Refusal,
    SessionLimitRace,
    StoreError,
)
from price_keeper.telemetry.logs import build_request_extra

STORE_RETRY_AFTER_SECONDS = 5  # by then the store may be reachable again
MAX_DETAILS = 20  # in one response; a body with more mistakes was not written for this API

ERROR_CODES: Mapping[int, str] = {
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
SESSION_LIMIT_RACE = "session_limit_race"  # a 503 with a code of its own

_log = logging.getLogger("price_keeper.control")


class ApiError(PriceKeeperError):
    """An error response. Each of `details` is the path of a mistake in body, path or query, and what is wrong there.

    `extra` are further fields of the response.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: Sequence[tuple[str, str]] = (),
        *,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.details = tuple(details)
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))
        super().__init__(message)

    def to_json(self, request_id: str, now: float) -> dict[str, Any]:
        return {
            "error": self.code,
            "message": self.message,
            "details": [{"path": path, "message": message} for path, message in self.details],
            **self.extra,
            "timestamp": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "request_id": request_id,
        }


def invalid_request(message: str, *details: tuple[str, str]) -> ApiError:
    more = [("", f"and {len(details) - MAX_DETAILS} more mistakes")] * (len(details) > MAX_DETAILS)
    return ApiError(400, ERROR_CODES[400], message, [*details[:MAX_DETAILS], *more])


def not_found(message: str) -> ApiError:
    return ApiError(404, ERROR_CODES[404], message)


def unauthorized(message: str) -> ApiError:
    return ApiError(401, ERROR_CODES[401], message, headers={"WWW-Authenticate": 'Bearer realm="price-keeper"'})


def forbidden(message: str) -> ApiError:
    return ApiError(403, ERROR_CODES[403], message)


def too_many_requests(message: str, retry_after: float) -> ApiError:
    return ApiError(429, ERROR_CODES[429], message, retry_after=retry_after)


def to_api_error(failure: Exception, request_id: str) -> ApiError:
    """Convert any exception into the error that the caller may see. Logs store errors and bugs; only the log has their
    cause."""
    match failure:
        case ApiError():
            return failure
        case web.HTTPNotFound():
            return not_found("there is no such path")
        case web.HTTPMethodNotAllowed():
            allowed = {"Allow": ", ".join(sorted(failure.allowed_methods - {"HEAD"}))}
            return ApiError(405, ERROR_CODES[405], f"this path serves only {allowed['Allow']}", headers=allowed)
        case InvalidSettings():
            details = [
                (".".join(part[:MAX_ECHOED_NAME_LENGTH] for part in path), text) for path, text in failure.mistakes
            ]
            return invalid_request("the settings cannot be used", *details)
        case ConfigError():
            return invalid_request(
                "this cannot be carried out",
                *((_get_path(line), _get_complaint(line)) for line in failure.problems),
            )
        case SessionLimitRace():
            return _build_race_error(failure)
        case Refusal():
            code = ERROR_CODES.get(failure.status, ERROR_CODES[400])
            return ApiError(failure.status, code, failure.message, retry_after=failure.retry_after)
        case StoreError() if not isinstance(failure, InvalidStoreRequest):
            _log.warning(
                "request %s failed: store error (%s)", request_id, failure, extra=build_request_extra(request_id)
            )
            return ApiError(
                503, ERROR_CODES[503], "the store is unreachable; try again", retry_after=STORE_RETRY_AFTER_SECONDS
            )
    _log.error(
        "request %s failed: %s", request_id, type(failure).__name__, extra=build_request_extra(request_id, failure)
    )
    return ApiError(500, ERROR_CODES[500], "internal error; the log has its cause under this request id")


def _build_race_error(failure: SessionLimitRace) -> ApiError:
    """The answer to a login that lost its races. The details are the store's reason for each write of the last
    attempt, in their order."""
    details = [(f"writes.{number}", reason.code.value) for number, reason in enumerate(failure.reasons)]
    return ApiError(
        failure.status,
        SESSION_LIMIT_RACE,
        failure.message,
        details,
        retry_after=failure.retry_after,
        extra={"retryable": True},
    )


def _get_path(line: str) -> str:
    return line.partition(": ")[0] if ": " in line else ""


def _get_complaint(line: str) -> str:
    return line.partition(": ")[2] or line
