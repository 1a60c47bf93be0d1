"""Bedrock itself: that each place resolves, connects, has a certificate to trust, and takes our signature.

What is asked is the state of an asynchronous job that does not exist: it is only read, and costs nothing. It does not
tell whether models may be called, since nothing that tells is certain to be free.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import quote

from price_keeper.dataplane import BEARER_VARIABLE
from price_keeper.doctor.asking import ProbeResponse, EndpointUnreachable, send_probe, build_host_header, build_get_request
from price_keeper.doctor.findings import DoctorCheck, Finding, ok, skipped, trouble, warning
from price_keeper.doctor.identity import NO_CREDENTIALS
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.places import Place, bedrock_places
from price_keeper.doctor.reaching import build_unreachable_finding
from price_keeper.errors import ConfigError
from price_keeper.forwarding.credentials import FixedCredentials
from price_keeper.forwarding.forwarder import Authorizer, BearerKey, Call, SignatureV4, Target
from price_keeper.forwarding.relay import NOT_OUR_CREDENTIALS, kind_of

_STALE = (b"Signature expired", b"Signature not yet current")


def upstream_checks(context: DoctorContext) -> list[DoctorCheck]:
    if context.is_simulated:
        return [DoctorCheck("Bedrock", _simulated)]
    places = bedrock_places(context.config)
    return [DoctorCheck(f"Bedrock in {place.region}", partial(_look, place)) for place in places]


async def _simulated(_: DoctorContext) -> Finding:
    return skipped("Bedrock is simulated; nothing leaves this machine")


async def _look(place: Place, context: DoctorContext) -> Finding:
    path = _path_of_nothing(place.region)
    authorizer = await _authorizer(context)
    lines = b"" if authorizer is None else _signed(authorizer, place, path)
    try:
        answered = await send_probe(place.endpoint, build_get_request(place.endpoint, path, lines), context.clock)
    except EndpointUnreachable as failure:
        return build_unreachable_finding(failure, place.endpoint, place.keys)
    where = place.endpoint.host
    if authorizer is None:
        mend = NO_CREDENTIALS if context.signs_calls else f"set {BEARER_VARIABLE}"
        return warning(f"{where} answers; nothing was asked, without credentials", mend)
    return _judged(answered, place, context)


def _path_of_nothing(region: str) -> str:
    arn = f"arn:aws:bedrock:{region}:000000000000:async-invoke/doctor000000"
    return f"/async-invoke/{quote(arn, safe='')}"


async def _authorizer(context: DoctorContext) -> Authorizer | None:
    if context.signs_calls:
        keys = (await context.credentials()).keys
        return None if keys is None else SignatureV4(FixedCredentials(keys), context.clock.now)
    try:
        return BearerKey(context.environ.get(BEARER_VARIABLE, ""))
    except ConfigError:
        return None


def _signed(authorizer: Authorizer, place: Place, path: str) -> bytes:
    target = Target(place.endpoint, place.region, "", path)
    call = Call("GET", "", (), lambda _: b"", (target,))
    return authorizer.lines(call, target, build_host_header(place.endpoint), b"")


def _judged(answered: ProbeResponse, place: Place, context: DoctorContext) -> Finding:
    where = place.endpoint.host
    kind = kind_of(answered.headers.get("x-amzn-errortype", "").encode("latin-1", "replace"))
    if any(words in answered.body for words in _STALE):
        return trouble(f"{where} refuses our signature: its time is off", "set the clock of this machine right")
    if kind in NOT_OUR_CREDENTIALS:
        return trouble(f"{where} refuses our credentials: {kind}", _renew(context))
    if kind == "AccessDeniedException":
        actions = "bedrock:InvokeModel, bedrock:InvokeModelWithResponseStream and bedrock:GetAsyncInvoke"
        return warning(f"{where} knows us, and may not be asked for a job: {kind}", f"allow {actions} by IAM")
    if "x-amzn-requestid" not in answered.headers:
        return warning(f"{where} answers {answered.status}, but not as Bedrock does", f"correct {place.keys}")
    if answered.status >= 500 or answered.status == 429:
        return warning(f"{where} answers {answered.status} {kind}".rstrip(), "try again; see health.aws.amazon.com")
    return ok(f"{where} answers, and takes our {'signature' if context.signs_calls else 'API key'}")


def _renew(context: DoctorContext) -> str:
    if context.signs_calls:
        return "renew the AWS credentials, or name others: aws sts get-caller-identity tells whose they are"
    return f"set {BEARER_VARIABLE} to a Bedrock API key that is good"
