"""Keys for tokens, the admin key, and AWS credentials: that they can be had. What they are is told to nobody."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from price_keeper.auth.keys import SigningKey, load_keys
from price_keeper.control.access import MIN_ADMIN_KEY_LENGTH, load_admin_key
from price_keeper.dataplane import BEARER_TOKEN_VARIABLE
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.errors import ConfigError
from price_keeper.forwarding.forwarder import BearerAuthorizer

CREDENTIALS_REMEDY = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give this machine, task or pod an IAM role"
)


def check_token_keys(context: DoctorContext) -> Finding:
    try:
        keys = load_keys(context.config.auth.keys, context.environ)
    except ConfigError as failure:
        remedy = "make one: price-keeper keys new --kid ID --out DIR; it tells what to write under auth.keys"
        sources = [key.secret_env or key.private_key_env for key in context.config.auth.keys]
        variables = ", ".join(source for source in sources if source)
        return trouble("; ".join(failure.problems), f"set {variables}, or {remedy}" if variables else remedy)
    return _JUDGE_KEYS_BY_ROLE[context.role](keys)


def _judge_sidecar_keys(keys: Sequence[SigningKey]) -> Finding:
    """It signs with none; that it could is a risk, since callers are near to it."""
    description = ", ".join(f"{key.kid} ({key.alg}, verifies)" for key in keys)
    minting = [key.kid for key in keys if key.signs_with is not None]
    if not minting:
        return ok(description)
    pair = "make a pair of EdDSA: price-keeper keys new --kid ID --out DIR"
    remedy = f"name the public half alone in auth.keys, as public_key_file; for HS256, which has none, {pair}"
    return warning(
        f"{description}; whoever reads {', '.join(minting)} here can make tokens, which a sidecar need not", remedy
    )


def _judge_control_keys(keys: Sequence[SigningKey]) -> Finding:
    if keys[0].signs_with is not None:
        return _judge_all_keys(keys)
    remedy = "name its private half in auth.keys.0, as private_key_file or private_key_env, or put another key first"
    return trouble(f"{keys[0].kid} ({keys[0].alg}) is a public half alone, and a control service signs with it", remedy)


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
            "there is none, so nobody is administrator of the control API", f"{instruction}: openssl rand -base64 32"
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
        until = "for this session alone; nobody here renews them" if credentials.keys.token else "they do not expire"
        return ok(f"by the provider {credentials.provider}; {until}")
    seconds_left = (credentials.expires - datetime.fromtimestamp(context.clock.now(), UTC)).total_seconds()
    message = f"by the provider {credentials.provider}; they expire at {credentials.expires.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
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
