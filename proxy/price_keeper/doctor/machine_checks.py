"""Checks of the machine: its clock, its time zone data and its limit of open files."""

from __future__ import annotations

import resource
import zoneinfo
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version

from price_keeper.doctor.bedrock_checks import list_bedrock_endpoints
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import EndpointUnreachable, build_get_request, send_probe
from price_keeper.org_calendar import load_zone
from price_keeper.server.server_limits import DEFAULT_LIMITS, MIN_LIMIT, UNLIMITED_DESCRIPTORS, fit_to_descriptors
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import parse_endpoint

MAX_CLOCK_OFFSET_SECONDS = 5.0  # budget periods turn at midnight, and tokens expire, by this clock
MAX_SIGNATURE_OFFSET_SECONDS = 300.0  # AWS refuses signatures with a larger offset
FEW_CONNECTIONS = 500  # concurrent connections; with fewer the sidecar may refuse those of a busy app
MIN_ZONES = 300  # the database has about six hundred names

_SET_CLOCK = "set it by the network: timedatectl set-ntp true, or chronyc makestep; in a VM or a pod, that of its host"


async def check_clock_by_store(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped("the store is a file of this machine")
    return await _compare_clock(context, parse_endpoint((await context.dynamodb()).meta.endpoint_url), "DynamoDB")


async def check_clock_by_bedrock(context: DoctorContext) -> Finding:
    if context.is_simulated:
        return skipped("Bedrock is simulated")
    return await _compare_clock(context, list_bedrock_endpoints(context.config)[0].endpoint, "Bedrock")


async def _compare_clock(context: DoctorContext, endpoint: UpstreamEndpoint, service: str) -> Finding:
    try:
        response = await send_probe(endpoint, build_get_request(endpoint), context.clock)
    except EndpointUnreachable:
        return skipped(f"{service} cannot be reached, as its own line says")
    try:
        server_time = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
    except ValueError:
        return skipped(f"what answers for {service} does not tell the time")
    return _judge_offset(
        response.answered_at - server_time - 0.5, service
    )  # the header has whole seconds, so half a second is the best estimate of the rest


def _judge_offset(offset_seconds: float, service: str) -> Finding:
    if abs(offset_seconds) <= MAX_CLOCK_OFFSET_SECONDS:
        return ok(f"agrees with {service}'s to a few seconds")
    message = f"{abs(offset_seconds):.0f} s {'ahead of' if offset_seconds > 0 else 'behind'} {service}'s"
    if abs(offset_seconds) <= MAX_SIGNATURE_OFFSET_SECONDS:
        return warning(message, _SET_CLOCK)
    return trouble(
        f"{message}: AWS refuses signatures that are {MAX_SIGNATURE_OFFSET_SECONDS / 60:g} minutes off", _SET_CLOCK
    )


def check_time_zones(context: DoctorContext) -> Finding:
    remedy = "install the locked requirements again: make setup, or pip install tzdata"
    try:
        data = f"tzdata {version('tzdata')}"
    except PackageNotFoundError:
        return trouble("the package tzdata is not installed", remedy)
    count = len(zoneinfo.available_timezones())
    if count < MIN_ZONES:
        return trouble(f"{data} has {count} time zones only", remedy)
    return ok(f"{count} in {data}; an org's default is {load_zone(context.config.defaults.timezone).key}")


def check_open_files(_: DoctorContext) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = UNLIMITED_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    connections = fit_to_descriptors(allowed).connections
    message = (
        f"{'any number' if hard == resource.RLIM_INFINITY else hard} may be open: {connections} connections at once"
    )
    remedy = (
        f"raise the hard limit to {3 * DEFAULT_LIMITS.connections}: LimitNOFILE= of systemd, --ulimit nofile= of Docker"
    )
    if connections <= MIN_LIMIT:
        return trouble(message, remedy)
    return ok(message) if connections >= FEW_CONNECTIONS else warning(message, remedy)
