"""The control service that a sidecar asks for credentials: there, itself, and with keys that we verify with."""

from __future__ import annotations

import json
from typing import Any

from price_keeper.auth.jwks import build_jwks
from price_keeper.auth.keys import load_keys
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import (
    EndpointUnreachable,
    ProbeResponse,
    build_get_request,
    build_unreachable_finding,
    send_probe,
)
from price_keeper.errors import ConfigError
from price_keeper.forwarding.forwarder import parse_endpoint
from price_keeper.forwarding.upstream import UpstreamEndpoint

_URL_KEY = "auth.control_url"
_ADDRESS_REMEDY = f"set {_URL_KEY} to the control port of price-keeper serve --role control"
_JWKS = "/.well-known/jwks.json"


async def check_control_service(context: DoctorContext) -> Finding:
    auth = context.config.auth
    if auth.identity is not None:
        return skipped("all calls are those of auth.identity, and need no credentials")
    if auth.control_url is None:
        return warning("there is none, so /credentials is answered with 403", _ADDRESS_REMEDY)
    endpoint = parse_endpoint(auth.control_url)
    try:
        health = await send_probe(endpoint, build_get_request(endpoint, "/health"), context.clock)
        keys = await send_probe(endpoint, build_get_request(endpoint, _JWKS), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, endpoint, _URL_KEY)
    return _judge_responses(endpoint, health, keys, context)


def _judge_responses(
    endpoint: UpstreamEndpoint, health: ProbeResponse, keys: ProbeResponse, context: DoctorContext
) -> Finding:
    where = f"{endpoint.host}:{endpoint.port}"
    health_report = _parse_json(health)
    if health.status != 200 or not isinstance(health_report, dict) or health_report.get("status") != "ok":
        return trouble(f"{where} is no control service: /health is answered with {health.status}", _ADDRESS_REMEDY)
    if keys.status in (429, 503):
        return warning(f"{where} answers {keys.status}", "try again; if it stays so, look at its /ready and its log")
    theirs = _read_public_keys(_parse_json(keys)) if keys.status == 200 else None
    if theirs is None:
        return trouble(f"{where} has no control API: {_JWKS} is answered with {keys.status}", _ADDRESS_REMEDY)
    try:
        mine = load_keys(context.config.auth.keys, context.environ)
    except ConfigError:
        return skipped(f"{where} is a control service; its keys cannot be compared with those here, which are amiss")
    return _compare_keys(where, theirs, _read_public_keys(build_jwks(mine)) or {})


def _parse_json(response: ProbeResponse) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        return None


def _read_public_keys(jwks: Any) -> dict[str, Any] | None:
    """By kid, the one that signs first."""
    keys = jwks.get("keys") if isinstance(jwks, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        return None
    return {str(key.get("kid"))[:64]: {name: key.get(name) for name in ("kty", "crv", "x", "n", "e")} for key in keys}


def _compare_keys(where: str, theirs: dict[str, Any], mine: dict[str, Any]) -> Finding:
    """A token counts if the key of its kid is the same on both sides."""
    remedy = f"write the public halves of its keys under auth.keys here, by the same kid: curl {where}{_JWKS} has them"
    if not theirs or not mine:
        if not theirs and not mine:
            return ok(f"{where} is a control service; secrets of HS256 are in no JWKS, so they were not compared")
        missing_side = "it tells of none" if mine else "there are secrets of HS256 alone here"
        return trouble(f"{where} is a control service, and of the keys with public halves {missing_side}", remedy)
    different = [kid for kid in theirs if kid in mine and theirs[kid] != mine[kid]]
    if different:
        return trouble(f"{where} has another key by the name of {_format_kids(different)}", remedy)
    unknown = [kid for kid in theirs if kid not in mine]
    if next(iter(theirs)) in unknown:
        return trouble(f"{where} signs with {_format_kids(unknown[:1])}, which does not verify here", remedy)
    if unknown:
        return warning(f"{where} also has {_format_kids(unknown)}, which does not verify here", remedy)
    obsolete = [kid for kid in mine if kid not in theirs]
    if obsolete:
        return warning(
            f"{where} has no key by the name of {_format_kids(obsolete)}",
            "remove it from auth.keys, if no token of it is left",
        )
    return ok(f"{where} is a control service, and its tokens verify here: {_format_kids(list(mine))}")


def _format_kids(kids: list[str]) -> str:
    shown = [kid if kid.isprintable() else "?" for kid in kids[:5]]
    return ", ".join(shown) + (f" and {len(kids) - 5} more" if len(kids) > 5 else "")
