"""Sign-in to the status page: exchanges an admin key or access token for a session cookie.

No script can read the cookie, no other site can cause it to be sent, and only requests of the page may use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from multidict import CIMultiDict

from price_keeper.auth.page_sessions import PageSession
from price_keeper.control.api_constants import API_KEY_HEADER, AUTHORIZATION_HEADER
from price_keeper.control.api_errors import ERROR_CODES, ApiError, forbidden
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.body_fields import BodyFields, choice_field, pattern_field
from price_keeper.control.control_access import (
    PAGE_HEADER,
    check_same_origin,
    cookie_name,
    get_session_principal,
    has_page_header,
    read_cookie,
)
from price_keeper.control.control_requests import MAX_ANONYMOUS_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.control.token_endpoints import count_failed_logins
from price_keeper.errors import Busy, TooManyRequests
from price_keeper.reports.settings_report import format_utc

ADMIN_KIND, CLIENT_KIND = "admin", "client"
_SECRET_FIELD = pattern_field(r"[ -~]+", 16 * 1024, "an admin key or an access token", is_secret=True)
SIGN_IN_BODY = BodyFields(
    {"kind": choice_field((ADMIN_KIND, CLIENT_KIND)), "secret": _SECRET_FIELD}, ("kind", "secret")
)
SIGNED_OUT: dict[str, Any] = {"is_signed_in": False, **dict.fromkeys(("is_admin", "org", "app", "expires_at"))}
_SESSION_PATH = "/status/session"


async def sign_in(services: ControlServices, request: ApiRequest) -> ApiResponse:
    check_same_origin(request.headers, is_change=True)
    body = SIGN_IN_BODY.parse(request.body)
    if not services.page_sessions.can_begin:
        raise ApiError(503, ERROR_CODES[503], "this instance has no key to sign sessions; use another instance")
    cookie, session = await _begin_session(services, request, body["kind"], body["secret"].strip())
    seconds = max(0, math.ceil(session.expires - services.clock.now()))
    return ApiResponse(_format_session(session), headers={"Set-Cookie": _format_cookie(request, cookie, seconds)})


async def _begin_session(
    services: ControlServices, request: ApiRequest, kind: str, secret: str
) -> tuple[str, PageSession]:
    """Start a session for a valid key or token. A wrong one counts as a failed login."""
    now = services.clock.now()
    if kind == ADMIN_KIND:
        principal = await services.authenticator.authenticate(CIMultiDict({API_KEY_HEADER: secret}), request.address)
        if not principal.is_admin:
            raise forbidden("the page is not for an org's key: sign in with an access token of the org")
        return services.page_sessions.begin_for_admin(now)
    await services.authenticator.authenticate(CIMultiDict({AUTHORIZATION_HEADER: f"Bearer {secret}"}), request.address)
    return services.page_sessions.begin_for_client(secret, now)


def _may_key_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    body = request.body if isinstance(request.body, Mapping) else {}
    kind, secret = body.get("kind"), body.get("secret")
    headers = CIMultiDict({API_KEY_HEADER: secret.strip()} if kind == ADMIN_KIND and isinstance(secret, str) else {})
    return services.authenticator.may_be_forged(headers)


async def get_page_session(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Report who is signed in. It is no error if nobody is."""
    cookie = read_cookie(request.headers) if has_page_header(request.headers) else None
    if cookie is None:
        return ApiResponse(SIGNED_OUT)
    check_same_origin(request.headers, is_change=False)
    expired_cookie = {"Set-Cookie": _format_cookie(request, "", 0)}
    try:
        return ApiResponse(_format_session(await services.authenticator.verify_session(cookie, request.address)))
    except TooManyRequests as failure:
        raise _too_many_attempts(failure, expired_cookie) from None
    except ApiError as failure:
        if failure.status != 401:
            raise
        return ApiResponse(SIGNED_OUT, headers=expired_cookie)


async def sign_out(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """End the session and delete the cookie. The cookie is deleted even if the session cannot be ended."""
    check_same_origin(request.headers, is_change=True)
    cookie, expired_cookie = read_cookie(request.headers), {"Set-Cookie": _format_cookie(request, "", 0)}
    try:
        if cookie is not None:
            with count_failed_logins(services, request):
                await services.page_sessions.end(cookie, services.clock.now())
    except ApiError:
        pass  # the cookie was invalid, or its session is over
    except TooManyRequests as failure:
        raise _too_many_attempts(failure, expired_cookie) from None
    except Busy as failure:
        message = "this browser is signed out, but the session cannot be revoked while the store is unreachable"
        raise ApiError(
            503, ERROR_CODES[503], message, retry_after=failure.retry_after, headers=expired_cookie
        ) from None
    return ApiResponse(SIGNED_OUT, headers=expired_cookie)


def _too_many_attempts(failure: TooManyRequests, expired_cookie: dict[str, str]) -> ApiError:
    """A 429 that also deletes the cookie: a browser that keeps sending a wrong cookie would get nothing but 429."""
    return ApiError(429, ERROR_CODES[429], failure.message, retry_after=failure.retry_after, headers=expired_cookie)


def _format_session(session: PageSession) -> dict[str, Any]:
    principal = get_session_principal(session)
    return {
        "is_signed_in": True,
        "is_admin": principal.is_admin,
        "org": principal.org,
        "app": principal.app,
        "expires_at": format_utc(session.expires),
    }


def _format_cookie(request: ApiRequest, value: str, seconds: int) -> str:
    """The Set-Cookie header. `Secure` is added if the page was loaded over https, which only its Origin shows."""
    secure = "; Secure" if request.headers.get("Origin", "").startswith("https://") else ""
    name = cookie_name(request.headers)
    return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


_SESSION_HEADERS = {PAGE_HEADER: "1, or nothing is done: pages from elsewhere cannot send it"}


def _build_session_route(method: str, operation_id: str, summary: str, handler: Any, **more: Any) -> ApiRoute:
    return ApiRoute(
        method, _SESSION_PATH, AccessLevel.PUBLIC, operation_id, summary, handler, {200: "PageSession"}, (401, 403),
        request_headers=_SESSION_HEADERS, group="page", **more,
    )  # fmt: skip


SIGN_IN_ROUTES = (
    _build_session_route(
        "GET",
        "getPageSession",
        "Who is signed in to the status page, if anybody",
        get_page_session,
        is_rate_limit_exempt=True,
    ),
    _build_session_route(
        "POST",
        "beginPageSession",
        "Sign in to the status page: a cookie for an admin key or an access token",
        sign_in,
        body_schema="PageSignIn",
        max_body_bytes=MAX_ANONYMOUS_BODY_BYTES,
        is_authenticated_by_secret=True,
        may_be_forged=_may_key_be_forged,
    ),
    _build_session_route("DELETE", "endPageSession", "Sign out", sign_out, is_authenticated_by_secret=True),
)
