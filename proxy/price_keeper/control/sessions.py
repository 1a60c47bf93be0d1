"""The sessions of a client, for an administrator to see and to end: a thief may have one of them."""

from __future__ import annotations

from price_keeper.auth.client_secrets import SESSIONS_GENERATION, client_item_key
from price_keeper.control.api_errors import invalid_request, not_found
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute, build_cacheable_response
from price_keeper.control.control_services import ControlServices
from price_keeper.domain import Scope, is_org_id
from price_keeper.errors import ReasonCode, TransactionFailed
from price_keeper.reports.settings_report import format_utc
from price_keeper.stores.conflict_retry import retry_on_conflict, transact_with_retry
from price_keeper.stores.contract import ItemExists, Update


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
        raise invalid_request(
            "the path names nothing that can be there", ("sid", "a session id is a UUID in lower case")
        )
    audit_record = request.actor.build_record("session.end", scope, {"session_id": sid}, None, services.clock.now())
    was_live = await services.sessions.end(scope, sid, [audit_record])
    if was_live is not None:
        return ApiResponse({"ended": int(was_live)})
    if not await services.sessions.revoke_tokens(scope, sid, [audit_record]):
        raise not_found("there is no such client")
    return ApiResponse({"ended": 0})


async def end_all_sessions(services: ControlServices, request: ApiRequest) -> ApiResponse:
    """In one write, which ends all refresh and access tokens of the client at once."""
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


def _get_scope(request: ApiRequest) -> Scope:
    return Scope(request.path["org"], request.path.get("app"))


def _build_session_routes(path: str, kind: str) -> tuple[ApiRoute, ...]:
    all_sessions, one_session = f"{path}/sessions", f"{path}/sessions/{{sid}}"
    return (
        ApiRoute(
            "GET",
            all_sessions,
            AccessLevel.ADMIN,
            f"list{kind}Sessions",
            "The sessions of a client, the oldest first",
            list_sessions,
            {200: "Sessions"},
            group="credentials",
        ),
        ApiRoute(
            "DELETE",
            all_sessions,
            AccessLevel.ADMIN,
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
            AccessLevel.ADMIN,
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
