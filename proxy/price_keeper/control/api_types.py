"""The types of the control API: the request that a handler receives, its response, and the route that joins the two.

A handler is a coroutine that takes `ControlServices` and an `ApiRequest` and returns an `ApiResponse`. A response with an
ETag can be revalidated, and preconditions (If-Match, If-None-Match) are checked against the same tags.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson
from multidict import MultiMapping

from price_keeper.control.api_constants import MAX_BODY_BYTES
from price_keeper.control.api_errors import ApiError
from price_keeper.stores.audit_log import Actor

if TYPE_CHECKING:
    from price_keeper.control.control_services import ControlServices

JSON = "application/json"
HTML = "text/html; charset=utf-8"
NO_STORE = "no-store"
REVALIDATE = "private, no-cache"  # may be kept, if it is asked each time whether it is still so


class AccessLevel(Enum):
    """Who may: always the administrator, and ANYBODY even without saying who he is."""

    PUBLIC = "anybody"
    ADMIN = "the administrator"
    ORG = "the org's own token"
    APP = "the app's own token, and to read its org's"
    ANY_CLIENT = "any client's token, and tells each what is its own"


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: the administrator, or a client of an org or an app. None in all is nobody in particular."""

    name: str
    org: str | None = None
    app: str | None = None
    is_admin: bool = False

    def may_read(self, org: str, app: str | None) -> bool:
        return self.is_admin or (self.org == org and self.app in (None, app))


@dataclass(slots=True)
class ApiRequest:
    request_id: str
    principal: Principal
    address: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: MultiMapping[str]
    body: Any = None

    @property
    def actor(self) -> Actor:
        return Actor(self.principal.name, self.request_id, self.address)

    def check_preconditions(self, etag: str | None) -> None:
        """Raises Problem where the caller wants another state than the one that is there; None is no state at all."""
        if_match, if_none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if if_match is not None and not matches_etag(if_match, etag):
            raise ApiError(412, "precondition_failed", "it is not any more what If-Match says; read it again")
        if if_none_match is not None and matches_etag(if_none_match, etag):
            raise ApiError(412, "precondition_failed", "it is there already, as If-None-Match says it must not be")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    body: Any = None  # None has no body; bytes are sent as they are
    status: int = 200
    cache_control: str = NO_STORE
    etag: str | None = None
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """An answer that goes on. Of `parts` an empty one says nothing: whether its reader is still there is looked at."""

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    content_type: str


ApiHandler = Callable[["ControlServices", ApiRequest], Awaitable[ApiResponse | StreamingResponse]]


def is_never_forged(_: ControlServices, __: ApiRequest) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """`answers` are the statuses of success with the names of their schemas, `problems` those of failure that are
    special to it. One table of these serves the requests and describes them."""

    method: str
    path: str
    access_level: AccessLevel
    operation_id: str
    summary: str
    handler: ApiHandler
    responses: Mapping[int, str]
    error_statuses: tuple[int, ...] = ()
    query_schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    request_headers: Mapping[str, str] = field(default_factory=dict)  # of the request, with what they are for
    status_descriptions: Mapping[int, str] = field(default_factory=dict)  # of statuses that mean more here than usual
    body_schema: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    group: str = "orgs"
    is_rate_limit_exempt: bool = False  # what costs next to nothing, and others cannot do without
    is_authenticated_by_secret: bool = (
        False  # a secret is all it shows: only wrong ones are limited, and by the handler
    )
    may_be_forged: Callable[[ControlServices, ApiRequest], bool] = (
        is_never_forged  # and so asks the store only in its turn
    )
    has_html_variant: bool = False  # for whoever does not ask for JSON
    media_types: tuple[str, ...] = ()  # what success comes as, where that is no JSON

    @property
    def is_read(self) -> bool:
        return self.method == "GET"

    def accepts_method(self, method: str) -> bool:
        """A secret is told once, so nobody may ask how it would be told."""
        return method == self.method or (method == "HEAD" and self.is_read and not self.is_authenticated_by_secret)

    @property
    def segments(self) -> tuple[str, ...]:
        return tuple(self.path.split("/")[1:])


def dump_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a number of more than 64 bits, or half a character
        return json.dumps(value, separators=(",", ":")).encode()


def compute_etag(value: Any) -> str:
    """Strong: equal tags mean equal bytes."""
    return compute_etag_of_bytes(dump_json(value))


def compute_etag_of_bytes(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def build_cacheable_response(value: Any, cache_control: str = REVALIDATE) -> ApiResponse:
    """What may be asked for again by its tag."""
    body = dump_json(value)
    return ApiResponse(body, cache_control=cache_control, etag=compute_etag_of_bytes(body))


def matches_etag(header: str, etag: str | None) -> bool:
    """Whether one of the tags of If-Match or If-None-Match is this one; `*` is any."""
    listed = [name.strip() for name in header.split(",")]
    return etag is not None and ("*" in listed or etag in listed)
