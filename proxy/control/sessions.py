"""The sessions of a client, for an administrator to see and to end: a thief may have one of them."""

from __future__ import annotations

from proxy.auth.clients import GENERATION, credentials_key
from proxy.control.calls import Answer, Call, Route, Who, read
from proxy.control.parts import Parts
from proxy.control.problems import invalid, not_found
from proxy.errors import ReasonCode, TransactionFailed
from proxy.model import Scope, is_org_id
from proxy.reporting.settings_shown import utc
from proxy.stores.again import transacted, until_nobody_was_faster
from proxy.stores.contract import ItemExists, Update


async def listed(parts: Parts, call: Call) -> Answer:
    found = [
        {
            "session_id": session.sid,
            "began_at": utc(session.began),
            "refreshed_at": utc(session.refreshed),
            "expires_at": utc(session.expires),
        }
        for session in await parts.sessions.live(_scope(call))
    ]
    return read({"sessions": found})


async def ended(parts: Parts, call: Call) -> Answer:
    scope, sid = _scope(call), call.path["sid"]
    if not is_org_id(sid):
        raise invalid("the path names nothing that can be there", ("sid", "a session id is a UUID in lower case"))
    done = call.actor.did("session.end", scope, {"session_id": sid}, None, parts.clock.now())
    if not await parts.sessions.end(scope, sid, [done]):
        raise not_found("the client has no such session; it may be over already")
    return Answer({"ended": 1})


async def all_ended(parts: Parts, call: Call) -> Answer:
    """The refresh tokens of all of them first, which takes one write, and then one by one the access tokens."""
    scope = _scope(call)
    done = call.actor.did("sessions.end", scope, None, None, parts.clock.now())
    over = Update(credentials_key(scope), add={GENERATION: 1}, condition=ItemExists())

    async def once() -> None:
        try:
            await transacted(parts.store, parts.clock, [over, done])
        except TransactionFailed as failure:
            if failure.reasons[0].code is ReasonCode.CONDITION_FAILED:
                raise not_found("there is no such client") from None
            raise

    try:
        await until_nobody_was_faster(parts.clock, once)
    finally:
        parts.clients.forget(scope)
    return Answer({"ended": await parts.sessions.end_all(scope)})


def _scope(call: Call) -> Scope:
    return Scope(call.path["org"], call.path.get("app"))


def _routes(path: str, of: str) -> tuple[Route, ...]:
    every, one = f"{path}/sessions", f"{path}/sessions/{{sid}}"
    told = "and with them the access tokens made from them"
    return (
        Route(
            "GET",
            every,
            Who.ADMIN,
            f"list{of}Sessions",
            "The sessions of a client, the oldest first",
            listed,
            {200: "Sessions"},
            group="credentials",
        ),
        Route(
            "DELETE",
            every,
            Who.ADMIN,
            f"end{of}Sessions",
            f"End all sessions of a client, {told}",
            all_ended,
            {200: "Ended"},
            (404,),
            group="credentials",
        ),
        Route(
            "DELETE",
            one,
            Who.ADMIN,
            f"end{of}Session",
            "End one session of a client, and with it the access tokens made from it",
            ended,
            {200: "Ended"},
            (404,),
            group="credentials",
        ),
    )


ROUTES = (*_routes("/api/v1/orgs/{org}", "Org"), *_routes("/api/v1/orgs/{org}/apps/{app}", "App"))
