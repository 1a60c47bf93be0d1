"""Endpoints for tokens: log in, refresh, revoke, container credentials, and the public keys (JWKS).

Log in, refresh and revoke take JSON of this API, and standard requests of OAuth 2.0 (`oauth.py`).

A secret is the only authentication of these requests, so wrong secrets count as failed logins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from price_keeper.auth.client_secrets import MAX_STALE_RETRIES
from price_keeper.auth.container_credentials import NO_SIGNING_KEY_RETRY_SECONDS
from price_keeper.auth.refresh_sessions import StaleGeneration, TokenPair
from price_keeper.auth.tokens import Claims
from price_keeper.control import oauth
from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request, unauthorized
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.body_fields import BodyFields, choice_field, pattern_field
from price_keeper.control.control_requests import MAX_ANONYMOUS_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.domain import Scope
from price_keeper.errors import AccessDenied, Busy, TokenExpired, TokenRejected

_TOKEN_FIELD = pattern_field(r"[!-~]+", 16 * 1024, "a token", is_secret=True)
_CLIENT_FIELDS = {
    "client_id": pattern_field(r"[!-~]+", 128, "a client id"),
    "client_secret": pattern_field(r"[!-~]+", 128, "a secret", is_secret=True),
}
LOGIN_BODY = BodyFields(
    {
        "grant_type": pattern_field("client_credentials", 18, "client_credentials"),
        **_CLIENT_FIELDS,
    },
    ("client_id", "client_secret"),
)
REFRESH_BODY = BodyFields(
    {"grant_type": choice_field((oauth.REFRESH_TOKEN,)), "refresh_token": _TOKEN_FIELD}, ("refresh_token",)
)
REFRESH_LOGIN_BODY = BodyFields(
    {**REFRESH_BODY.types, **_CLIENT_FIELDS}, ("grant_type", "refresh_token", "client_id", "client_secret")
)
REVOKE_BODY = BodyFields({"token": _TOKEN_FIELD}, ("token",))
LOGIN_SCHEMA = BodyFields(  # of both grants; each is parsed by its own fields
    {
        **LOGIN_BODY.types,
        "grant_type": pattern_field(f"({oauth.CLIENT_CREDENTIALS}|{oauth.REFRESH_TOKEN})", 18, "a grant type"),
        "refresh_token": _TOKEN_FIELD,
    },
    LOGIN_BODY.required,
).schema
# A standard server ignores parameters that it does not know, so forms are open.
_FORM_TEXT: Mapping[str, Any] = {"type": "string"}
_CLIENT_PARAMETERS = dict.fromkeys(("client_id", "client_secret"), _FORM_TEXT)
LOGIN_FORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "grant_type": {"type": "string", "enum": [oauth.CLIENT_CREDENTIALS, oauth.REFRESH_TOKEN]},
        "refresh_token": _FORM_TEXT,
        "scope": _FORM_TEXT,
        **_CLIENT_PARAMETERS,
    },
    "required": ["grant_type"],
}
REFRESH_FORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "grant_type": {"type": "string", "enum": [oauth.REFRESH_TOKEN]},
        "refresh_token": _FORM_TEXT,
        **_CLIENT_PARAMETERS,
    },
    "required": ["refresh_token"],
}
REVOKE_FORM: Mapping[str, Any] = {
    "type": "object",
    "properties": {"token": _FORM_TEXT, "token_type_hint": _FORM_TEXT, **_CLIENT_PARAMETERS},
    "required": ["token"],
}


async def login(services: ControlServices, request: ApiRequest) -> ApiResponse:
    if oauth.is_standard(request):
        return await _answer_token_request(services, request)
    if isinstance(request.body, Mapping) and request.body.get("grant_type") == oauth.REFRESH_TOKEN:
        REFRESH_LOGIN_BODY.parse(request.body)
        return await _answer_token_request(services, request)
    given = LOGIN_BODY.parse(request.body)
    return await _log_in(services, request, oauth.ClientPair(given["client_id"], given["client_secret"]))


async def _answer_token_request(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """A token request of RFC 6749, for either grant type."""
    grant_type = oauth.read_parameter(request, "grant_type")
    pair = oauth.require_client(request)
    if grant_type == oauth.CLIENT_CREDENTIALS:
        with oauth.convert_rejections("invalid_client"):
            return await _log_in(services, request, pair)
    if grant_type != oauth.REFRESH_TOKEN:
        raise oauth.oauth_error("unsupported_grant_type", "grant_type is client_credentials or refresh_token")
    token = oauth.read_parameter(request, "refresh_token")
    scope = await _authenticate_client(services, request, pair)
    with oauth.convert_rejections("invalid_grant"):
        return await _refresh(services, request, token, scope)


async def _authenticate_client(services: ControlServices, request: ApiRequest, pair: oauth.ClientPair) -> Scope:
    with oauth.convert_rejections("invalid_client"), count_failed_logins(services, request, pair.client_id):
        return await services.clients.verify(*pair, request.address)


async def _log_in(services: ControlServices, request: ApiRequest, pair: oauth.ClientPair) -> ApiResponse:
    _require_signing_key(services)
    for _ in range(MAX_STALE_RETRIES):
        with count_failed_logins(services, request, pair.client_id):
            checked = await services.clients.verify_with_generation(*pair, request.address)
        try:
            return _build_token_response(services, await services.sessions.login(*checked))
        except StaleGeneration:  # the client's sessions were ended after its record was cached here
            services.clients.invalidate(checked[0])
    raise Busy("the sessions of this client were ended during each attempt to log in; try again", retry_after=2)


async def refresh(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Exchange a refresh token. A standard request may show the client too, who must be the token's then."""
    if not oauth.is_standard(request):
        return await _refresh(services, request, REFRESH_BODY.parse(request.body)["refresh_token"])
    body = request.body if isinstance(request.body, Mapping) else {}
    if body.get("grant_type", oauth.REFRESH_TOKEN) != oauth.REFRESH_TOKEN:
        raise oauth.oauth_error("unsupported_grant_type", "grant_type is refresh_token here")
    token, pair = oauth.read_parameter(request, "refresh_token"), oauth.read_client(request)
    scope = None if pair is None else await _authenticate_client(services, request, pair)
    with oauth.convert_rejections("invalid_grant"):
        return await _refresh(services, request, token, scope)


async def _refresh(
    services: ControlServices, request: ApiRequest, token: str, scope: Scope | None = None
) -> ApiResponse:
    """Exchange a refresh token, which must be of this client if one is given."""
    _require_signing_key(services)
    with count_failed_logins(services, request):
        if scope is not None:
            _require_owner(services.tokens.verify_refresh(token), scope)
        return _build_token_response(services, await services.sessions.refresh(token))


def _require_owner(claims: Claims, scope: Scope) -> None:
    if (claims.caller.org, claims.caller.app) != (scope.org, scope.app):
        raise TokenRejected("the token was issued to another client")


async def revoke(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Revoke a token for its holder, or for its client by RFC 7009; a refresh token ends its whole session."""
    if oauth.is_standard(request):
        return await _answer_revocation_request(services, request)
    given = REVOKE_BODY.parse(request.body)
    with count_failed_logins(services, request):
        await services.sessions.revoke_by_token(given["token"])
    return ApiResponse({"is_revoked": True})


async def _answer_revocation_request(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Revoke a token of this client. One that is not valid, and so needs no revocation, is answered alike."""
    token = oauth.read_parameter(request, "token")
    scope = await _authenticate_client(services, request, oauth.require_client(request))
    try:
        claims = services.tokens.verify_any(token)
    except (AccessDenied, TokenExpired):
        return ApiResponse({"is_revoked": True})
    with oauth.convert_rejections("invalid_grant"), count_failed_logins(services, request):
        _require_owner(claims, scope)
        await services.sessions.revoke_by_token(token)
    return ApiResponse({"is_revoked": True})


async def get_metadata(_: ControlServices, request: ApiRequest) -> ApiResponse:
    host = request.headers.get("Host")
    if not host:
        raise invalid_request("the answer has the addresses of the endpoints, so it needs a Host header")
    return ApiResponse(oauth.build_metadata(host))


async def issue_container_credentials(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Issue container credentials for sidecars that cannot sign tokens; they relay the app's Authorization header."""
    _require_signing_key(services)
    authorization = request.headers.get("Authorization", "")
    client_id = authorization.partition(":")[0]
    with count_failed_logins(services, request, client_id):
        return ApiResponse(dict(await services.credential_issuer.issue(authorization, request.address)))


def _may_login_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    pair = oauth.find_client(request)
    return pair is not None and services.clients.needs_throttled_lookup(*pair)


def _may_client_pair_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    client_id, _, secret = request.headers.get("Authorization", "").partition(":")
    return services.clients.needs_throttled_lookup(client_id, secret)


async def get_jwks(services: ControlServices, _: ApiRequest) -> ApiResponse:
    return build_cacheable_response(services.tokens.build_jwks(), "public, max-age=300")


def _require_signing_key(services: ControlServices) -> None:
    """Raise ApiError (503) if this process cannot sign tokens. Called first, because valid credentials would not
    help."""
    if not services.tokens.can_mint:
        message = "this instance cannot sign tokens: auth.keys has no private key first; use another instance"
        raise ApiError(503, ERROR_CODES[503], message, retry_after=NO_SIGNING_KEY_RETRY_SECONDS)


def _build_token_response(services: ControlServices, issued: TokenPair) -> ApiResponse:
    tokens: dict[str, Any] = {
        "access_token": issued.access.token,
        "refresh_token": issued.refresh.token,
        "token_type": "Bearer",
        "expires_in": max(0, int(issued.access.expires - services.clock.now())),
        "refresh_expires_in": max(0, int(issued.refresh.expires - services.clock.now())),
        "session_id": issued.sid,
    }
    return ApiResponse(tokens, headers={"Pragma": "no-cache"})


@contextmanager
def count_failed_logins(services: ControlServices, request: ApiRequest, client_id: str | None = None) -> Iterator[None]:
    """Turn a rejection within the block into an ApiError (401), and count it unless it is a token with a valid
    signature. Raises TooManyRequests after too many failures."""
    try:
        yield
    except (TokenExpired, TokenRejected) as failure:  # its signature is valid, so it is no guess
        raise unauthorized(failure.message) from None
    except AccessDenied as failure:
        services.login_throttle.count_failure(client_id, request.address)
        raise unauthorized(failure.message) from None


_NO_KEY_DESCRIPTION: Mapping[int, str] = {
    503: "Service Unavailable: too much at once, the store is away, or there is no key to sign tokens with here"
}


def _build_post_route(
    path: str, operation_id: str, summary: str, handler: Any, response_schema: str, body_schema: str
) -> ApiRoute:
    return ApiRoute(
        "POST",
        path,
        AccessLevel.PUBLIC,
        operation_id,
        summary,
        handler,
        {200: response_schema},
        (401,),
        body_schema=body_schema,
        form_schema=f"{body_schema}Form",
        max_body_bytes=MAX_ANONYMOUS_BODY_BYTES,
        status_descriptions={} if handler is revoke else _NO_KEY_DESCRIPTION,
        group="auth",
        is_authenticated_by_secret=True,
        may_be_forged=_may_login_be_forged,
    )


TOKEN_ROUTES = (
    _build_post_route(
        "/auth/token",
        "login",
        "Tokens for a client's id and secret",
        login,
        "Tokens",
        "Login",
    ),
    _build_post_route(
        "/auth/refresh", "refresh", "New tokens for a refresh token, which ends", refresh, "Tokens", "Refresh"
    ),
    _build_post_route(
        "/auth/revoke", "revoke", "End a token, or with a refresh token its session", revoke, "Revoked", "Revoke"
    ),
    ApiRoute(
        "GET",
        "/credentials",
        AccessLevel.PUBLIC,
        "getContainerCredentials",
        "AWS credentials with an access token, for client_id:client_secret as Authorization",
        issue_container_credentials,
        {200: "ContainerCredentials"},
        (401,),
        status_descriptions=_NO_KEY_DESCRIPTION,
        group="auth",
        is_authenticated_by_secret=True,
        may_be_forged=_may_client_pair_be_forged,
    ),
    ApiRoute(
        "GET",
        "/.well-known/oauth-authorization-server",
        AccessLevel.PUBLIC,
        "oauthMetadata",
        "Addresses and supported methods of the token endpoints (RFC 8414)",
        get_metadata,
        {200: "AuthorizationServer"},
        group="auth",
        is_rate_limit_exempt=True,
    ),
    ApiRoute(
        "GET",
        "/.well-known/jwks.json",
        AccessLevel.PUBLIC,
        "jwks",
        "The public halves of the keys that sign tokens",
        get_jwks,
        {200: "Jwks"},
        group="auth",
        is_rate_limit_exempt=True,
    ),
)
