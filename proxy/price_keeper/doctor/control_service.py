"""The control service that a sidecar asks for credentials: there, itself, and with keys that we verify with."""

from __future__ import annotations

import json
from typing import Any

from price_keeper.auth.jwks import public_halves
from price_keeper.auth.keys import load_keys
from price_keeper.doctor.asking import ProbeResponse, EndpointUnreachable, send_probe, build_get_request
from price_keeper.doctor.findings import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.reaching import build_unreachable_finding
from price_keeper.errors import ConfigError
from price_keeper.forwarding.forwarder import endpoint_of
from price_keeper.forwarding.upstream import Endpoint

_KEY = "auth.control_url"
_OTHER = f"set {_KEY} to the control port of price-keeper serve --role control"
_JWKS = "/.well-known/jwks.json"


async def control_service(context: DoctorContext) -> Finding:
    auth = context.config.auth
    if auth.identity is not None:
        return skipped("all calls are those of auth.identity, and need no credentials")
    if auth.control_url is None:
        return warning("there is none, so /credentials is answered with 403", _OTHER)
    endpoint = endpoint_of(auth.control_url)
    try:
        health = await send_probe(endpoint, build_get_request(endpoint, "/health"), context.clock)
        keys = await send_probe(endpoint, build_get_request(endpoint, _JWKS), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, endpoint, _KEY)
    return _judged(endpoint, health, keys, context)


def _judged(endpoint: Endpoint, health: ProbeResponse, keys: ProbeResponse, context: DoctorContext) -> Finding:
    where = f"{endpoint.host}:{endpoint.port}"
    told = _json(health)
    if health.status != 200 or not isinstance(told, dict) or told.get("status") != "ok":
        return trouble(f"{where} is no control service: /health is answered with {health.status}", _OTHER)
    if keys.status in (429, 503):
        return warning(f"{where} answers {keys.status}", "try again; if it stays so, look at its /ready and its log")
    theirs = _keys(_json(keys)) if keys.status == 200 else None
    if theirs is None:
        return trouble(f"{where} has no control API: {_JWKS} is answered with {keys.status}", _OTHER)
    try:
        mine = load_keys(context.config.auth.keys, context.environ)
    except ConfigError:
        return skipped(f"{where} is a control service; its keys cannot be compared with those here, which are amiss")
    return _compared(where, theirs, _keys(public_halves(mine)) or {})


def _json(answered: ProbeResponse) -> Any:
    try:
        return json.loads(answered.body)
    except (ValueError, RecursionError):
        return None


def _keys(told: Any) -> dict[str, Any] | None:
    """By kid, the one that signs first."""
    keys = told.get("keys") if isinstance(told, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        return None
    return {str(key.get("kid"))[:64]: {name: key.get(name) for name in ("kty", "crv", "x", "n", "e")} for key in keys}


def _compared(where: str, theirs: dict[str, Any], mine: dict[str, Any]) -> Finding:
    """A token counts if the key of its kid is the same on both sides."""
    mend = f"write the public halves of its keys under auth.keys here, by the same kid: curl {where}{_JWKS} has them"
    if not theirs or not mine:
        if not theirs and not mine:
            return ok(f"{where} is a control service; secrets of HS256 are in no JWKS, so they were not compared")
        whose = "it tells of none" if mine else "there are secrets of HS256 alone here"
        return trouble(f"{where} is a control service, and of the keys with public halves {whose}", mend)
    others = [kid for kid in theirs if kid in mine and theirs[kid] != mine[kid]]
    if others:
        return trouble(f"{where} has another key by the name of {_named(others)}", mend)
    unknown = [kid for kid in theirs if kid not in mine]
    if next(iter(theirs)) in unknown:
        return trouble(f"{where} signs with {_named(unknown[:1])}, which does not verify here", mend)
    if unknown:
        return warning(f"{where} also has {_named(unknown)}, which does not verify here", mend)
    old = [kid for kid in mine if kid not in theirs]
    if old:
        return warning(
            f"{where} has no key by the name of {_named(old)}", "remove it from auth.keys, if no token of it is left"
        )
    return ok(f"{where} is a control service, and its tokens verify here: {_named(list(mine))}")


def _named(kids: list[str]) -> str:
    shown = [kid if kid.isprintable() else "?" for kid in kids[:5]]
    return ", ".join(shown) + (f" and {len(kids) - 5} more" if len(kids) > 5 else "")
