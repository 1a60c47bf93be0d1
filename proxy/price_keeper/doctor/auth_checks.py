"""Checks of keys, credentials and identity: token keys, admin key, AWS credentials, Bedrock API key, the registered org
of a fixed identity, and the control service.

Findings name configuration keys and variables, never their values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from price_keeper.auth.signing_keys import SigningKey, load_needed_keys
from price_keeper.auth.tokens import build_jwks
from price_keeper.control.control_access import MIN_ADMIN_KEY_LENGTH, load_admin_key
from price_keeper.data_port_wiring import BEARER_TOKEN_VARIABLE
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import (
    EndpointUnreachable,
    ProbeResponse,
    build_get_request,
    build_unreachable_finding,
    send_probe,
)
from price_keeper.errors import ConfigError, StoreError
from price_keeper.stores import schema
from price_keeper.stores.sqlite_file import has_item
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import BearerAuthorizer, parse_endpoint

CREDENTIALS_REMEDY = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine, task or pod an IAM role"
)


def check_token_keys(context: DoctorContext) -> Finding:
    try:
        keys = load_needed_keys(context.config.auth, context.environ)
    except ConfigError as failure:
        remedy = "make one: price-keeper keys new --kid ID --out DIR; it tells what to write under auth.keys"
        sources = [key.secret_env or key.private_key_env for key in context.config.auth.keys]
        variables = ", ".join(source for source in sources if source)
        return trouble("; ".join(failure.problems), f"set {variables}, or {remedy}" if variables else remedy)
    if not keys and context.role != "control":
        return ok("none; auth.mode is identity, which verifies no tokens")
    return _JUDGE_KEYS_BY_ROLE[context.role](keys)


def _judge_sidecar_keys(keys: Sequence[SigningKey]) -> Finding:
    """A sidecar only verifies tokens. A key that can also sign is a risk there, close to untrusted callers."""
    description = ", ".join(f"{key.kid} ({key.alg}, verifies)" for key in keys)
    minting = [key.kid for key in keys if key.signs_with is not None]
    if not minting:
        return ok(description)
    pair = "make a pair of EdDSA: price-keeper keys new --kid ID --out DIR"
    remedy = f"name the public half alone in auth.keys, as public_key_file; for HS256, which has none, {pair}"
    return warning(
        f"{description}; everyone who can read {', '.join(minting)} here can mint tokens; a sidecar only verifies",
        remedy,
    )


def _judge_control_keys(keys: Sequence[SigningKey]) -> Finding:
    if keys and keys[0].signs_with is not None:
        return _judge_all_keys(keys)
    remedy = "name its private half in auth.keys.0, as private_key_file or private_key_env, or put another key first"
    found = f"{keys[0].kid} ({keys[0].alg}) is a public half alone" if keys else "there is none"
    return trouble(f"{found}, and a control service signs with it", remedy)


def _judge_all_keys(keys: Sequence[SigningKey]) -> Finding:
    signs = "signs" if keys[0].signs_with is not None else "verifies alone"
    descriptions = [f"{key.kid} ({key.alg}, {'verifies' if number else signs})" for number, key in enumerate(keys)]
    return ok(", ".join(descriptions))


_JUDGE_KEYS_BY_ROLE = {"both": _judge_all_keys, "sidecar": _judge_sidecar_keys, "control": _judge_control_keys}


def check_admin_key(context: DoctorContext) -> Finding:
    auth = context.config.auth
    instruction = (
        f"set {auth.admin_api_key_env}, or auth.admin_api_key_file, to at least {MIN_ADMIN_KEY_LENGTH} characters"
    )
    try:
        key = load_admin_key(auth, context.environ)
    except ConfigError as failure:
        return trouble("; ".join(failure.problems), f"{instruction}: openssl rand -base64 32")
    if key is None:
        return warning(
            "there is none, so the control API has no administrator", f"{instruction}: openssl rand -base64 32"
        )
    source = auth.admin_api_key_file or f"the variable {auth.admin_api_key_env}"
    return ok(f"from {source}")


async def check_aws_credentials(context: DoctorContext) -> Finding:
    if not context.needs_aws:
        return skipped("neither the store nor Bedrock needs any here")
    credentials = await context.credentials()
    if credentials.keys is None:
        return trouble(credentials.problem, CREDENTIALS_REMEDY)
    if credentials.expires is None:
        until = "for this session only; they cannot be renewed here" if credentials.keys.token else "they do not expire"
        return ok(f"by the provider {credentials.provider}; {until}")
    seconds_left = (credentials.expires - datetime.fromtimestamp(context.clock.now(), UTC)).total_seconds()
    expires = f"{credentials.expires.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    message = f"by the provider {credentials.provider}; they expire at {expires}"
    return (
        ok(message)
        if seconds_left > 0
        else trouble(message, "renew them (aws sso login, for instance), and set the clock right")
    )


def check_bedrock_key(context: DoctorContext) -> Finding:
    if context.is_simulated or context.signs_calls:
        return skipped("calls to Bedrock carry no API key" if context.signs_calls else "Bedrock is simulated")
    remedy = f"set {BEARER_TOKEN_VARIABLE} to a Bedrock API key, or upstream.auth to sigv4"
    if not context.environ.get(BEARER_TOKEN_VARIABLE):
        return trouble(f"the variable {BEARER_TOKEN_VARIABLE} is not set", remedy)
    try:
        BearerAuthorizer(context.environ[BEARER_TOKEN_VARIABLE])
    except ConfigError as failure:
        return trouble("; ".join(failure.problems), remedy)
    return ok(f"from the variable {BEARER_TOKEN_VARIABLE}")


async def check_identity_org(context: DoctorContext) -> Finding:
    identity = context.config.auth.identity
    if identity is None:
        return skipped("every call brings a token, which names its org")
    try:
        is_there = await _is_registered(context, identity.org)
    except StoreError as failure:
        return skipped(f"the store cannot be asked: {failure}")
    if is_there:
        return ok(f"{identity.org} is registered")
    is_refused = context.config.unknown_org == "refuse"
    effect = "its calls are refused" if is_refused else "its calls are served without a budget"
    return warning(
        f"the org {identity.org} is not registered, so {effect} (unknown_org: {context.config.unknown_org})",
        f"price-keeper org put {identity.org} FILE, or correct auth.identity.org",
    )


async def _is_registered(context: DoctorContext, org: str) -> bool:
    key = schema.org_config_key(org)
    if context.is_on_dynamodb:
        store = await context.dynamodb_store()
        return await store.get(key, consistent=True) is not None
    return await asyncio.to_thread(has_item, Path(context.config.store.path), key)


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
        mine = load_needed_keys(context.config.auth, context.environ)
    except ConfigError:
        return skipped(f"{where} is a control service; its keys cannot be compared with those here, which are invalid")
    if not mine:
        return ok(f"{where} is a control service; auth.mode is identity here, which verifies no tokens")
    return _compare_keys(where, theirs, _read_public_keys(build_jwks(mine)) or {})


def _parse_json(response: ProbeResponse) -> Any:
    try:
        return json.loads(response.body)
    except (ValueError, RecursionError):
        return None


def _read_public_keys(jwks: Any) -> dict[str, Any] | None:
    """The public keys of a JWKS by kid, the signing key first; None if it is no JWKS."""
    keys = jwks.get("keys") if isinstance(jwks, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        return None
    return {str(key.get("kid"))[:64]: {name: key.get(name) for name in ("kty", "crv", "x", "n", "e")} for key in keys}


def _compare_keys(where: str, theirs: dict[str, Any], mine: dict[str, Any]) -> Finding:
    """Compare public keys: a token verifies here if the key of its kid is the same on both sides."""
    remedy = f"write the public halves of its keys under auth.keys here, by the same kid: curl {where}{_JWKS} has them"
    if not theirs or not mine:
        if not theirs and not mine:
            return ok(f"{where} is a control service; secrets of HS256 are in no JWKS, so they were not compared")
        missing_side = "it publishes none" if mine else "there are only secrets of HS256 here"
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
