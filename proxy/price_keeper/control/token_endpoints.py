"""Endpoints for tokens: log in, refresh, revoke, container credentials, and the public keys (JWKS).

A secret is the only authentication of these requests, so wrong secrets count as failed logins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from price_keeper.auth.client_secrets import MAX_STALE_RETRIES
from price_keeper.auth.container_credentials import NO_SIGNING_KEY_RETRY_SECONDS
from price_keeper.auth.refresh_sessions import StaleGeneration, TokenPair
from price_keeper.control.api_errors import ERROR_CODES, ApiError, unauthorized
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.body_fields import BodyFields, pattern_field
from price_keeper.control.control_requests import MAX_ANONYMOUS_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.errors import AccessDenied, Busy, TokenExpired, TokenRejected

_TOKEN_FIELD = pattern_field(r"[!-~]+", 16 * 1024, "a token", is_secret=True)
LOGIN_BODY = BodyFields(
    {
        "grant_type": pattern_field("client_credentials", 18, "client_credentials"),
        "client_id": pattern_field(r"[!-~]+", 128, "a client id"),
        "client_secret": pattern_field(r"[!-~]+", 128, "a secret", is_secret=True),
    },
    ("client_id", "client_secret"),
)
REFRESH_BODY = BodyFields({"refresh_token": _TOKEN_FIELD}, ("refresh_token",))
REVOKE_BODY = BodyFields({"token": _TOKEN_FIELD}, ("token",))


async def login(services: ControlServices, request: ApiRequest) -> ApiResponse:
    given = LOGIN_BODY.parse(request.body)
    _require_signing_key(services)
    for _ in range(MAX_STALE_RETRIES):
        with count_failed_logins(services, request, given["client_id"]):
            checked = await services.clients.verify_with_generation(
                given["client_id"], given["client_secret"], request.address
            )
        try:
            return _build_token_response(services, await services.sessions.login(*checked))
        except StaleGeneration:  # the client's sessions were ended after its record was cached here
            services.clients.invalidate(checked[0])
    raise Busy("the sessions of this client were ended during each attempt to log in; try again", retry_after=2)


async def refresh(services: ControlServices, request: ApiRequest) -> ApiResponse:
    given = REFRESH_BODY.parse(request.body)
    _require_signing_key(services)
    with count_failed_logins(services, request):
        return _build_token_response(services, await services.sessions.refresh(given["refresh_token"]))


async def revoke(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Revoke a token for its holder; a refresh token ends its whole session."""
    given = REVOKE_BODY.parse(request.body)
    with count_failed_logins(services, request):
        await services.sessions.revoke_by_token(given["token"])
    return ApiResponse({"is_revoked": True})


async def issue_container_credentials(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Issue container credentials for sidecars that cannot sign tokens; they relay the app's Authorization header."""
    _require_signing_key(services)
    authorization = request.headers.get("Authorization", "")
    client_id = authorization.partition(":")[0]
    with count_failed_logins(services, request, client_id):
        return ApiResponse(dict(await services.credential_issuer.issue(authorization, request.address)))


def _may_login_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    given = request.body if isinstance(request.body, Mapping) else {}
    return services.clients.needs_throttled_lookup(str(given.get("client_id")), str(given.get("client_secret")))


def _may_client_pair_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    client_id, _, secret = request.headers.get("Authorization", "").partition(":")
    return services.clients.needs_throttled_lookup(client_id, secret)


async def get_jwks(services: ControlServices, _: ApiRequest) -> ApiResponse:
    return build_cacheable_response(services.tokens.build_jwks(), "public, max-age=300")


def _require_signing_key(services: ControlServices) -> None:
    """Raise ApiError (503) if this process cannot sign tokens. Called first, because valid credentials would not
    help."""
    if not services.tokens.can_mint:
        message = "this instance cannot sign tokens: the first key of auth.keys is a public key; use another instance"
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
    return ApiResponse(tokens)


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
    path: str, operation_id: str, summary: str, handler: Any, response_schema: str, body_schema: str, **more: Any
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
        max_body_bytes=MAX_ANONYMOUS_BODY_BYTES,
        status_descriptions={} if handler is revoke else _NO_KEY_DESCRIPTION,
        group="auth",
        is_authenticated_by_secret=True,
        **more,
    )


TOKEN_ROUTES = (
    _build_post_route(
        "/auth/token",
        "login",
        "Tokens for a client's id and secret",
        login,
        "Tokens",
        "Login",
        may_be_forged=_may_login_be_forged,
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
