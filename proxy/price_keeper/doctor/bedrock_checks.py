"""Checks of Bedrock: each endpoint resolves, accepts connections, has a trusted certificate and accepts credentials.

The request reads the state of an asynchronous job that does not exist: it changes nothing and costs nothing. The
permission to invoke models is not checked, as no call that would show it is certain to be free.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from urllib.parse import quote

from price_keeper.config import Config
from price_keeper.data_port_wiring import BEARER_TOKEN_VARIABLE, build_regional_url
from price_keeper.doctor.auth_checks import CREDENTIALS_REMEDY
from price_keeper.doctor.doctor_checks import DoctorCheck, Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import (
    EndpointUnreachable,
    ProbeResponse,
    build_get_request,
    build_host_header,
    build_unreachable_finding,
    send_probe,
)
from price_keeper.errors import ConfigError
from price_keeper.upstream.aws_credentials import StaticCredentials
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import (
    Authorizer,
    BearerAuthorizer,
    SigV4Authorizer,
    UpstreamCall,
    UpstreamTarget,
    parse_endpoint,
)
from price_keeper.upstream.relay import CREDENTIAL_ERRORS, parse_error_type


class BedrockEndpoint(NamedTuple):
    region: str
    endpoint: UpstreamEndpoint
    config_keys: str  # the configuration keys that select this endpoint
    labels: tuple[str, ...]  # the labels that use it


def list_bedrock_endpoints(config: Config) -> list[BedrockEndpoint]:
    """The upstream's endpoint first, which serves all calls without an endpoint of their label."""
    default_url = config.upstream.endpoint
    labels_by_endpoint = {(config.upstream.region, default_url): ["upstream"]}
    for name, label in config.labels.items():
        for each in label.endpoints:
            labels_by_endpoint.setdefault((each.region, each.endpoint or default_url), []).append(name)
    return [
        _build_bedrock_endpoint(
            region,
            url,
            "upstream.endpoint and upstream.region" if number == 0 else _format_config_key(labels[0]),
            labels,
        )
        for number, ((region, url), labels) in enumerate(labels_by_endpoint.items())
    ]


def _build_bedrock_endpoint(region: str, url: str | None, keys: str, labels: list[str]) -> BedrockEndpoint:
    return BedrockEndpoint(
        region, parse_endpoint(url or build_regional_url(region)), keys, tuple(dict.fromkeys(labels))
    )


def _format_config_key(label: str) -> str:
    return f"labels.{label}.endpoints"


_CLOCK_SKEW_TEXTS = (b"Signature expired", b"Signature not yet current")


def build_bedrock_checks(context: DoctorContext) -> list[DoctorCheck]:
    if context.is_simulated:
        return [DoctorCheck("Bedrock", _skip_simulated)]
    endpoints = list_bedrock_endpoints(context.config)
    return [DoctorCheck(f"Bedrock in {each.region}", partial(_check_bedrock, each)) for each in endpoints]


async def _skip_simulated(_: DoctorContext) -> Finding:
    return skipped("Bedrock is simulated; nothing leaves this machine")


async def _check_bedrock(bedrock: BedrockEndpoint, context: DoctorContext) -> Finding:
    path = _build_missing_job_path(bedrock.region)
    authorizer = await _build_authorizer(context)
    lines = b"" if authorizer is None else _sign(authorizer, bedrock, path)
    try:
        response = await send_probe(bedrock.endpoint, build_get_request(bedrock.endpoint, path, lines), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, bedrock.endpoint, bedrock.config_keys)
    where = bedrock.endpoint.host
    if authorizer is None:
        remedy = CREDENTIALS_REMEDY if context.signs_calls else f"set {BEARER_TOKEN_VARIABLE}"
        return warning(f"{where} answers; nothing was asked, without credentials", remedy)
    return _judge_response(response, bedrock, context)


def _build_missing_job_path(region: str) -> str:
    arn = f"arn:aws:bedrock:{region}:000000000000:async-invoke/doctor000000"
    return f"/async-invoke/{quote(arn, safe='')}"


async def _build_authorizer(context: DoctorContext) -> Authorizer | None:
    if context.signs_calls:
        keys = (await context.credentials()).keys
        return None if keys is None else SigV4Authorizer(StaticCredentials(keys), context.clock.now)
    try:
        return BearerAuthorizer(context.environ.get(BEARER_TOKEN_VARIABLE, ""))
    except ConfigError:
        return None


def _sign(authorizer: Authorizer, bedrock: BedrockEndpoint, path: str) -> bytes:
    target = UpstreamTarget(bedrock.endpoint, bedrock.region, "", path)
    call = UpstreamCall("GET", "", (), lambda _: b"", (target,))
    return authorizer.build_header_lines(call, target, build_host_header(bedrock.endpoint), b"")


def _judge_response(response: ProbeResponse, bedrock: BedrockEndpoint, context: DoctorContext) -> Finding:
    where = bedrock.endpoint.host
    kind = parse_error_type(response.headers.get("x-amzn-errortype", "").encode("latin-1", "replace"))
    if any(words in response.body for words in _CLOCK_SKEW_TEXTS):
        return trouble(f"{where} refuses our signature: its time is off", "set the clock of this machine right")
    if kind in CREDENTIAL_ERRORS:
        return trouble(f"{where} refuses our credentials: {kind}", _build_renewal_remedy(context))
    if kind == "AccessDeniedException":
        actions = "bedrock:InvokeModel, bedrock:InvokeModelWithResponseStream and bedrock:GetAsyncInvoke"
        return warning(f"{where} accepts our credentials, which may not read a job: {kind}", f"allow {actions} by IAM")
    if "x-amzn-requestid" not in response.headers:
        return warning(f"{where} answers {response.status}, but not as Bedrock does", f"correct {bedrock.config_keys}")
    if response.status >= 500 or response.status == 429:
        return warning(f"{where} answers {response.status} {kind}".rstrip(), "try again; see health.aws.amazon.com")
    return ok(f"{where} answers, and takes our {'signature' if context.signs_calls else 'API key'}")


def _build_renewal_remedy(context: DoctorContext) -> str:
    if context.signs_calls:
        return "renew the AWS credentials, or name others: aws sts get-caller-identity tells whose they are"
    return f"set {BEARER_TOKEN_VARIABLE} to a Bedrock API key that is good"
