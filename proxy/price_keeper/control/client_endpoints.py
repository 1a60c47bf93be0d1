"""Endpoints for the credentials and sessions of a client.

Credentials are created with an org or an app; their secret can be fetched once, with a retrieval token. An
administrator rotates credentials, and lists or ends sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from price_keeper.auth.client_secrets import SESSIONS_GENERATION, client_item_key
from price_keeper.auth.org_keys import remove_org_key, rotate_org_key
from price_keeper.auth.registration import (
    MAX_GRACE_HOURS,
    IssuedSecret,
    RetrievalRefused,
    is_tagged_token,
    register,
    retrieve,
    rotate,
)
from price_keeper.auth.revocation import REVOCATION_ATTRIBUTES
from price_keeper.control.api_constants import DEFAULT_GRACE_HOURS, RETRIEVAL_TOKEN_HEADER
from price_keeper.control.api_errors import invalid_request, not_found, unauthorized
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.body_fields import BodyFields, integer_field
from price_keeper.control.control_requests import SMALL_BODY_BYTES
from price_keeper.control.control_services import ControlServices
from price_keeper.control.token_endpoints import count_failed_logins
from price_keeper.domain import Scope, build_client_id, is_org_id
from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.reports.settings_report import format_utc
from price_keeper.stores.audit_log import select_attributes
from price_keeper.stores.conflict_retry import retry_on_conflict, transact_with_retry
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, ItemExists, Update, Write

ROTATION_BODY = BodyFields({"grace_hours": integer_field(0, MAX_GRACE_HOURS)}, ())


async def create_credentials(services: ControlServices, request: ApiRequest, scope: Scope) -> Mapping[str, Any]:
    """Create a client's credentials. Returns nothing if it has some: a secret is never issued twice."""
    audit_record = request.actor.build_record("credentials.make", scope, None, None, services.clock.now())
    issued = await register(
        services.store,
        services.clock,
        scope,
        services.clients.invalidate,
        [audit_record],
        services.tokens.secret_tagger,
    )
    return {} if issued is None else _format_issued(services, issued)


async def rotate_credentials(services: ControlServices, request: ApiRequest) -> ApiResponse:
    scope = Scope(request.path["org"], request.path.get("app"))
    hours = ROTATION_BODY.parse(request.body).get("grace_hours", DEFAULT_GRACE_HOURS)
    audit_record = request.actor.build_record(
        "credentials.rotate", scope, None, {"grace_hours": hours}, services.clock.now()
    )
    try:
        issued = await rotate(
            services.store,
            services.clock,
            scope,
            hours,
            services.clients.invalidate,
            [audit_record],
            services.tokens.secret_tagger,
        )
    finally:  # even if the store's response was lost, because the write may have been applied
        if not hours:
            services.sessions.note_all_ended()
    return ApiResponse(_format_issued(services, issued))


async def fetch_secret(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Return a secret for its retrieval token, which is the only authentication: the client has no secret yet."""
    token = request.headers.get(RETRIEVAL_TOKEN_HEADER)
    if token is None:
        raise unauthorized(f"send the retrieval token in the header {RETRIEVAL_TOKEN_HEADER}")
    scope = Scope(request.path["org"], request.path.get("app"))
    client_id = build_client_id(scope.org, scope.app)
    with count_failed_logins(services, request, client_id):
        if is_tagged_token(services.tokens.secret_tagger, scope, token):
            await services.marked_retrieval_throttle.wait_for(token)
            slots = services.marked_retrieval_slots
        else:
            await services.retrieval_throttle.wait_for_address(request.address)
            slots = services.retrieval_slots
        async with slots:
            secret = await _retrieve_and_count(services, scope, token)
    return ApiResponse({"client_id": client_id, "client_secret": secret})


def _may_be_forged(services: ControlServices, request: ApiRequest) -> bool:
    token = request.headers.get(RETRIEVAL_TOKEN_HEADER)
    return token is not None and not is_tagged_token(
        services.tokens.secret_tagger, Scope(request.path["org"], request.path.get("app")), token
    )


async def _retrieve_and_count(services: ControlServices, scope: Scope, token: str) -> str:
    try:
        secret = await retrieve(services.store, services.clock, scope, token)
    except RetrievalRefused as failure:
        services.retrieval_token_counts["refused"] += 1
        services.retrieval_refusals[failure.reason] += 1
        raise
    services.retrieval_token_counts["used"] += 1
    return secret


def _format_issued(services: ControlServices, issued: IssuedSecret) -> dict[str, Any]:
    services.retrieval_token_counts["made"] += 1
    return {
        "client_id": issued.client_id,
        "secret_retrieval_token": issued.retrieval_token,
        "secret_retrieval_expires_at": format_utc(issued.expires),
    }


def _build_credential_routes(path: str, kind: str) -> tuple[ApiRoute, ApiRoute]:
    return (
        ApiRoute(
            "POST",
            f"{path}/credentials/rotate",
            AccessLevel.ORG_ADMIN,
            f"rotate{kind}Credentials",
            "Make a new secret; the one so far stays good for the grace",
            rotate_credentials,
            {200: "Issued"},
            (404, 409),
            body_schema="Rotation",
            max_body_bytes=SMALL_BODY_BYTES,
            group="credentials",
        ),
        ApiRoute(
            "GET",
            f"{path}/credentials/secret",
            AccessLevel.PUBLIC,
            f"get{kind}Secret",
            "The secret, once, for the retrieval token that making or rotating it answered",
            fetch_secret,
            {200: "Secret"},
            (401,),
            request_headers={RETRIEVAL_TOKEN_HEADER: "valid once, for ten minutes"},
            group="credentials",
            is_authenticated_by_secret=True,
            may_be_forged=_may_be_forged,
        ),
    )


CREDENTIAL_ROUTES = (
    *_build_credential_routes("/api/v1/orgs/{org}", "Org"),
    *_build_credential_routes("/api/v1/orgs/{org}/apps/{app}", "App"),
)


async def list_sessions(services: ControlServices, request: ApiRequest) -> ApiResponse:
    sessions = [
        {
            "session_id": session.sid,
            "began_at": format_utc(session.began),
            "refreshed_at": format_utc(session.refreshed),
            "expires_at": format_utc(session.expires),
        }
        for session in await services.sessions.list_live(_get_scope(request))
    ]
    return build_cacheable_response({"sessions": sessions})


async def end_session(services: ControlServices, request: ApiRequest) -> ApiResponse:
    scope, sid = _get_scope(request), request.path["sid"]
    if not is_org_id(sid):
        raise invalid_request("the path has an invalid id", ("sid", "a session id is a UUID in lower case"))

    def audit(revocation: Item) -> Sequence[Write]:
        after = select_attributes(revocation, REVOCATION_ATTRIBUTES)
        return [request.actor.build_record("session.end", scope, {"session_id": sid}, after, services.clock.now())]

    was_live = await services.sessions.end(scope, sid, audit)
    if was_live is not None:
        return ApiResponse({"ended": int(was_live)})
    if request.principal.is_org_admin:
        await _require_own_revocation(services, scope, sid)
    if not await services.sessions.revoke_tokens(scope, sid, audit):
        raise not_found("there is no such client")
    return ApiResponse({"ended": 0})


async def _require_own_revocation(services: ControlServices, scope: Scope, sid: str) -> None:
    """Raise ApiError (404) unless the id is known to be of a revoked session of this client. Access tokens are refused
    by their session's id alone, so an org's key could otherwise revoke tokens of another org."""
    client_id = build_client_id(scope.org, scope.app)
    if await services.revocation.find_revocation(client_id, sid) is None:
        raise not_found(f"no session of {client_id} has this id; tokens of one that is over end with all its sessions")


async def get_revocation(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Describe a revoked token or session of the client; 404 for any other, revoked or not."""
    scope, name = _get_scope(request), request.path["sid"]
    if not is_org_id(name):
        raise invalid_request("the path has an invalid id", ("sid", "the id is a UUID in lower case"))
    client_id = build_client_id(scope.org, scope.app)
    row = await services.revocation.find_revocation(client_id, name)
    if row is None:
        raise not_found(f"no token or session of {client_id} with this id is revoked")
    shown: dict[str, Any] = {"id": name, **(select_attributes(row, REVOCATION_ATTRIBUTES) or {})}
    return build_cacheable_response({**shown, EXPIRY_ATTRIBUTE: row[EXPIRY_ATTRIBUTE]})


async def end_all_sessions(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """End all sessions with one write, which invalidates all refresh and access tokens of the client at once."""
    scope = _get_scope(request)
    number = len(await services.sessions.list_live(scope))
    audit_record = request.actor.build_record("sessions.end", scope, None, None, services.clock.now())
    new_generation = Update(client_item_key(scope), add={SESSIONS_GENERATION: 1}, condition=ItemExists())

    async def write() -> None:
        try:
            await transact_with_retry(services.store, services.clock, [new_generation, audit_record])
        except TransactionFailed as failure:
            if failure.reasons[0].code is ReasonCode.CONDITION_FAILED:
                raise not_found("there is no such client") from None
            raise

    try:
        await retry_on_conflict(services.clock, write)
    finally:
        services.clients.invalidate(scope)
        services.sessions.note_all_ended()
    return ApiResponse({"ended": number})


async def rotate_key_of_org(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """Make the org's administrator key, or its next one. The answer is the only place where it is shown."""
    org = request.path["org"]
    hours = ROTATION_BODY.parse(request.body).get("grace_hours", DEFAULT_GRACE_HOURS)
    audit_record = request.actor.build_record(
        "org_key.rotate", Scope(org), None, {"grace_hours": hours}, services.clock.now()
    )
    try:
        key = await rotate_org_key(
            services.store, services.clock, org, hours, [audit_record], services.tokens.secret_tagger
        )
    finally:  # even if the store's response was lost, because the write may have been applied
        services.org_keys.invalidate(org)
    return ApiResponse({"org": org, "admin_key": key})


async def remove_key_of_org(services: ControlServices, request: ApiRequest) -> ApiResponse:
    org = request.path["org"]
    audit_record = request.actor.build_record("org_key.remove", Scope(org), None, None, services.clock.now())
    try:
        await remove_org_key(services.store, services.clock, org, [audit_record])
    finally:
        services.org_keys.invalidate(org)
    return ApiResponse({"org": org, "is_removed": True})


ORG_KEY_ROUTES = (
    ApiRoute(
        "POST",
        "/api/v1/orgs/{org}/admin-key",
        AccessLevel.ADMIN,
        "rotateOrgKey",
        "Make an org's administrator key, shown only here; the one so far stays good for the grace",
        rotate_key_of_org,
        {200: "OrgKeyIssued"},
        (404, 409),
        body_schema="Rotation",
        max_body_bytes=SMALL_BODY_BYTES,
        group="credentials",
    ),
    ApiRoute(
        "DELETE",
        "/api/v1/orgs/{org}/admin-key",
        AccessLevel.ADMIN,
        "removeOrgKey",
        "Remove an org's administrator key, with the one that is in its grace",
        remove_key_of_org,
        {200: "OrgKeyRemoved"},
        (404,),
        group="credentials",
    ),
)


def _get_scope(request: ApiRequest) -> Scope:
    return Scope(request.path["org"], request.path.get("app"))


def _build_session_routes(path: str, kind: str) -> tuple[ApiRoute, ...]:
    all_sessions, one_session = f"{path}/sessions", f"{path}/sessions/{{sid}}"
    return (
        ApiRoute(
            "GET",
            f"{path}/revocations/{{sid}}",
            AccessLevel.ORG_ADMIN,
            f"get{kind}Revocation",
            "Which token of a client was revoked and when, by the id of a token or session",
            get_revocation,
            {200: "Revocation"},
            (404,),
            group="credentials",
        ),
        ApiRoute(
            "GET",
            all_sessions,
            AccessLevel.ORG_ADMIN,
            f"list{kind}Sessions",
            "The sessions of a client, the oldest first",
            list_sessions,
            {200: "Sessions"},
            group="credentials",
        ),
        ApiRoute(
            "DELETE",
            all_sessions,
            AccessLevel.ORG_ADMIN,
            f"end{kind}Sessions",
            "End all sessions of a client, and all access tokens made for it so far",
            end_all_sessions,
            {200: "Ended"},
            (404,),
            group="credentials",
        ),
        ApiRoute(
            "DELETE",
            one_session,
            AccessLevel.ORG_ADMIN,
            f"end{kind}Session",
            "End one session of a client, if it is not over, and the access tokens made from it",
            end_session,
            {200: "Ended"},
            (404,),
            group="credentials",
        ),
    )


SESSION_ROUTES = (
    *_build_session_routes("/api/v1/orgs/{org}", "Org"),
    *_build_session_routes("/api/v1/orgs/{org}/apps/{app}", "App"),
)
