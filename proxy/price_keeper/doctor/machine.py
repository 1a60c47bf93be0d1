"""The machine itself: its clock, its time zones, how many files may be open."""

from __future__ import annotations

import resource
import zoneinfo
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version

from price_keeper.calendar_days import known_zone
from price_keeper.doctor.asking import EndpointUnreachable, send_probe, build_get_request
from price_keeper.doctor.findings import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.places import bedrock_places
from price_keeper.forwarding.forwarder import endpoint_of
from price_keeper.forwarding.upstream import Endpoint
from price_keeper.surface.limits import DEFAULT, ENOUGH_DESCRIPTORS, FEWEST, fitting

OFF_SECONDS = 5.0  # quotas turn at midnight, and tokens expire, by this clock
REFUSED_SECONDS = 300.0  # AWS refuses signatures that are further off
FEW_CONNECTIONS = 500  # of callers at once: below this a busy app may be turned away
FEWEST_ZONES = 300  # the database has about six hundred names

_SET_CLOCK = "set it by the network: timedatectl set-ntp true, or chronyc makestep; in a VM or a pod, that of its host"


async def clock_by_store(context: DoctorContext) -> Finding:
    if not context.is_on_dynamodb:
        return skipped("the store is a file of this machine")
    return await _compared(context, endpoint_of((await context.dynamodb()).meta.endpoint_url), "DynamoDB")


async def clock_by_bedrock(context: DoctorContext) -> Finding:
    if context.is_simulated:
        return skipped("Bedrock is simulated")
    return await _compared(context, bedrock_places(context.config)[0].endpoint, "Bedrock")


async def _compared(context: DoctorContext, endpoint: Endpoint, whose: str) -> Finding:
    try:
        answered = await send_probe(endpoint, build_get_request(endpoint), context.clock)
    except EndpointUnreachable:
        return skipped(f"{whose} cannot be reached, as its own line says")
    try:
        told = parsedate_to_datetime(answered.headers.get("date", "")).timestamp()
    except ValueError:
        return skipped(f"what answers for {whose} does not tell the time")
    return _judged(answered.answered_at - told - 0.5, whose)  # whole seconds are told: half a one is the best guess


def _judged(off: float, whose: str) -> Finding:
    if abs(off) <= OFF_SECONDS:
        return ok(f"agrees with {whose}'s to a few seconds")
    found = f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {whose}'s"
    if abs(off) <= REFUSED_SECONDS:
        return warning(found, _SET_CLOCK)
    return trouble(f"{found}: AWS refuses signatures that are {REFUSED_SECONDS / 60:g} minutes off", _SET_CLOCK)


def time_zones(context: DoctorContext) -> Finding:
    mend = "install the locked requirements anew: make setup, or pip install tzdata"
    try:
        data = f"tzdata {version('tzdata')}"
    except PackageNotFoundError:
        return trouble("the package tzdata is not installed", mend)
    count = len(zoneinfo.available_timezones())
    if count < FEWEST_ZONES:
        return trouble(f"{data} has {count} time zones only", mend)
    return ok(f"{count} in {data}; an org's default is {known_zone(context.config.defaults.timezone).key}")


def open_files(_: DoctorContext) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allowed = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    connections = fitting(allowed).connections
    found = f"{'any number' if hard == resource.RLIM_INFINITY else hard} may be open: {connections} connections at once"
    mend = f"raise the hard limit to {3 * DEFAULT.connections}: LimitNOFILE= of systemd, --ulimit nofile= of Docker"
    if connections <= FEWEST:
        return trouble(found, mend)
    return ok(found) if connections >= FEW_CONNECTIONS else warning(found, mend)
