"""The types of the control API: the request that a handler receives, its response, and the route that joins the two.

A handler is a coroutine that takes `ControlServices` and an `ApiRequest` and returns an `ApiResponse`. A response with
an ETag can be revalidated, and preconditions (If-Match, If-None-Match) are checked against the same tags.
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
FORM = "application/x-www-form-urlencoded"
HTML = "text/html; charset=utf-8"
NO_STORE = "no-store"
API_PREFIX = "/api/v1"
REVALIDATE = "private, no-cache"  # may be cached, but must be revalidated before each use


class AccessLevel(Enum):
    """Who may use a route. The administrator may use all; PUBLIC routes need no authentication. The values appear in
    the OpenAPI document."""

    PUBLIC = "anybody"
    ADMIN = "the administrator"
    ORG_ADMIN = "the org's administrator key"
    ORG = "the org's own token"
    APP = "the app's own token, and to read its org's"
    ANY_CLIENT = "any client's token, and tells each what is its own"


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: the administrator, an org's administrator, a client of an org or an app, or an anonymous caller."""

    name: str
    org: str | None = None
    app: str | None = None
    is_admin: bool = False
    is_org_admin: bool = False  # of `org`

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
        """Check If-Match and If-None-Match against the current ETag, which is None if the resource does not exist.
        Raises ApiError (412)."""
        if_match, if_none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if if_match is not None and not matches_etag(if_match, etag):
            raise ApiError(412, "precondition_failed", "it was changed, and does not match If-Match; read it again")
        if if_none_match is not None and matches_etag(if_none_match, etag):
            raise ApiError(412, "precondition_failed", "it exists already, and If-None-Match requires that it does not")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    body: Any = None  # None sends no body, bytes are sent unchanged, and anything else is sent as JSON
    status: int = 200
    cache_control: str = NO_STORE
    etag: str | None = None
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A response of unlimited length. An empty chunk sends nothing, and only checks whether the client is connected."""

    chunks: Callable[[], AsyncGenerator[bytes, None]]
    content_type: str


ApiHandler = Callable[["ControlServices", ApiRequest], Awaitable[ApiResponse | StreamingResponse]]


def is_never_forged(_: ControlServices, __: ApiRequest) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One operation of the API. The same table of routes serves requests and generates the OpenAPI document.

    `responses` maps success statuses to the names of their schemas; `error_statuses` are those specific to the route.
    """

    method: str
    path: str
    access_level: AccessLevel
    operation_id: str
    summary: str
    handler: ApiHandler
    responses: Mapping[int, str]
    error_statuses: tuple[int, ...] = ()
    query_schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    request_headers: Mapping[str, str] = field(default_factory=dict)  # names and descriptions
    status_descriptions: Mapping[int, str] = field(default_factory=dict)  # of statuses with a special meaning here
    body_schema: str | None = None
    form_schema: str | None = None  # of a body that may be a form as well
    max_body_bytes: int = MAX_BODY_BYTES
    group: str = "orgs"
    is_rate_limit_exempt: bool = False  # for routes that cost almost nothing and that other clients depend on
    is_authenticated_by_secret: bool = False  # the handler checks a secret; only wrong ones are rate-limited
    # Whether the request's credentials may be made up, so that checking them waits for a slot at the store.
    may_be_forged: Callable[[ControlServices, ApiRequest], bool] = is_never_forged
    has_html_variant: bool = False  # for clients that do not prefer JSON
    media_types: tuple[str, ...] = ()  # of successful responses that are not JSON

    @property
    def paths(self) -> tuple[str, ...]:
        """Each path of the API answers without its prefix too."""
        is_api = self.path.startswith(f"{API_PREFIX}/")
        return (self.path, self.path.removeprefix(API_PREFIX)) if is_api else (self.path,)

    @property
    def is_read(self) -> bool:
        return self.method == "GET"

    @property
    def methods(self) -> tuple[str, ...]:
        """HEAD is served like GET, except where GET consumes a one-time secret."""
        return ("GET", "HEAD") if self.is_read and not self.is_authenticated_by_secret else (self.method,)


def dump_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson rejects integers above 64 bits and half surrogate pairs
        return json.dumps(value, separators=(",", ":")).encode()


def compute_etag(value: Any) -> str:
    """A strong ETag: equal tags mean equal bytes."""
    return compute_etag_of_bytes(dump_json(value))


def compute_etag_of_bytes(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def build_cacheable_response(value: Any, cache_control: str = REVALIDATE) -> ApiResponse:
    """A JSON response with an ETag, which clients may revalidate with If-None-Match."""
    body = dump_json(value)
    return ApiResponse(body, cache_control=cache_control, etag=compute_etag_of_bytes(body))


def matches_etag(header: str, etag: str | None) -> bool:
    """Whether one of the tags of If-Match or If-None-Match is this one; `*` is any."""
    listed = [name.strip() for name in header.split(",")]
    return etag is not None and ("*" in listed or etag in listed)
