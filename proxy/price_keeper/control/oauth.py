"""What OAuth 2.0 adds to the token endpoints: client authentication and errors of RFC 6749, and metadata of RFC 8414.

A request is standard if its body is a form, or if it has HTTP Basic credentials. Other requests have the forms and the
errors of this API, as ever. START HERE: `is_standard` and `read_client`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from price_keeper.control.api_constants import AUTHORIZATION_HEADER
from price_keeper.control.api_errors import ApiError
from price_keeper.control.api_types import ApiRequest
from price_keeper.control.control_requests import FormBody
from price_keeper.server.sockets import is_loopback

CLIENT_CREDENTIALS, REFRESH_TOKEN = "client_credentials", "refresh_token"
ErrorCode: TypeAlias = Literal["invalid_request", "invalid_client", "invalid_grant", "unsupported_grant_type"]
OAUTH_ERRORS: tuple[ErrorCode, ...] = (
    "invalid_request", "invalid_client", "invalid_grant", "unsupported_grant_type",
)  # fmt: skip

_BASIC = "basic "
_MAX_FIELD_LENGTH = 16 * 1024


class ClientPair(NamedTuple):
    client_id: str
    client_secret: str


def oauth_error(code: ErrorCode, description: str) -> ApiError:
    """An error of RFC 6749, section 5.2. `message` is the same text, for clients of this API."""
    is_client = code == "invalid_client"
    headers = {"WWW-Authenticate": 'Basic realm="price-keeper"'} if is_client else {}
    extra = {"error_description": description}
    return ApiError(401 if is_client else 400, code, description, headers=headers, extra=extra)


def is_standard(request: ApiRequest) -> bool:
    return isinstance(request.body, FormBody) or _read_basic(request) is not None


def find_client(request: ApiRequest) -> ClientPair | None:
    """The credentials that a request shows, right or wrong; None if there are none, or they cannot be read."""
    try:
        return read_client(request)
    except ApiError:
        return None


def read_client(request: ApiRequest) -> ClientPair | None:
    """The client's id and secret, from HTTP Basic or the body; None if there are none. Raises ApiError."""
    body = request.body if isinstance(request.body, Mapping) else {}
    in_body = {name: body[name] for name in ("client_id", "client_secret") if isinstance(body.get(name), str)}
    basic = _read_basic(request)
    if basic is None:
        return ClientPair(**in_body) if len(in_body) == 2 else None
    try:
        text = base64.b64decode(basic, validate=True).decode()
    except ValueError:  # binascii.Error and UnicodeDecodeError are; a header that is not ASCII raises it alone
        raise oauth_error("invalid_client", "the Basic credentials are not base64 of client_id:client_secret") from None
    client_id, _, secret = text.partition(":")
    # Both are form-encoded by the standard, which many clients omit: a secret has a '+' of its own, but never a '%'.
    pair = ClientPair(unquote(client_id), unquote(secret))
    if "client_secret" in in_body or in_body.get("client_id", pair.client_id) != pair.client_id:
        raise oauth_error("invalid_request", "show the client's credentials once: as HTTP Basic or in the body")
    return pair


def _read_basic(request: ApiRequest) -> str | None:
    header = request.headers.get(AUTHORIZATION_HEADER, "")
    return header[len(_BASIC) :].strip() if header[: len(_BASIC)].lower() == _BASIC else None


def require_client(request: ApiRequest) -> ClientPair:
    """Like `read_client`. Raises ApiError (401) if the request shows no credentials."""
    pair = read_client(request)
    if pair is None:
        raise oauth_error("invalid_client", "show the client's id and secret, as HTTP Basic or in the body")
    return pair


def read_parameter(request: ApiRequest, name: str) -> str:
    """A required parameter. Raises ApiError."""
    value = request.body.get(name) if isinstance(request.body, Mapping) else None
    if not isinstance(value, str) or not value:
        raise oauth_error("invalid_request", f"the parameter {name} is required")
    if len(value) > _MAX_FIELD_LENGTH:
        raise oauth_error("invalid_request", f"the parameter {name} is too long")
    return value


@contextmanager
def convert_rejections(code: ErrorCode) -> Iterator[None]:
    """Turn a 401 of this API within the block into an error of the standard."""
    try:
        yield
    except ApiError as failure:
        if failure.status != 401:
            raise
        raise oauth_error(code, failure.message) from None


def build_metadata(host: str) -> dict[str, Any]:
    """The metadata of RFC 8414. Elsewhere than on loopback, what is in front of this API speaks https."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    issuer = f"{'http' if name.lower() == 'localhost' or is_loopback(name) else 'https'}://{host}"
    auth_methods = ["client_secret_basic", "client_secret_post"]
    return {
        "issuer": issuer,
        "token_endpoint": f"{issuer}/auth/token",
        "revocation_endpoint": f"{issuer}/auth/revoke",
        "jwks_uri": f"{issuer}/.well-known/jwks.json",
        "grant_types_supported": [CLIENT_CREDENTIALS, REFRESH_TOKEN],
        "response_types_supported": ["none"],  # no authorization endpoint; the field is required
        "token_endpoint_auth_methods_supported": auth_methods,
        "revocation_endpoint_auth_methods_supported": auth_methods,
    }
