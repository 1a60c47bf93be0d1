"""Which model an application inference profile is of: Bedrock's GetInferenceProfile, cached.

The ARN of such a profile does not name its model, and a profile never changes it. A lookup is shared by all who wait
for it (single-flight). Callers choose the ARNs, so only configured regions are asked, and the caches and the lookups at
one time, in all and of each caller, are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp
import orjson
from cachetools import TLRUCache, TTLCache
from yarl import URL

from price_keeper.client_tls import get_client_context
from price_keeper.clock import Clock
from price_keeper.domain import Caller
from price_keeper.errors import UpstreamUnavailable
from price_keeper.model_ids import find_base_model
from price_keeper.operations import encode_model_id
from price_keeper.single_flight import SingleFlight
from price_keeper.telemetry.incident import Incident
from price_keeper.upstream.forwarder import Authorizer, UpstreamCall, UpstreamTarget, format_host, parse_endpoint

PROFILE_SECONDS: Final = 3600.0  # how long an answer of Bedrock holds
FAILURE_SECONDS: Final = 10.0  # how long a profile that Bedrock did not name a model for is not looked up again
TIMEOUT_FAILURE_SECONDS: Final = 60.0  # the same if Bedrock did not answer in time, which holds a lookup for long
MAX_PROFILES: Final = 1000  # cached; an account has 1,000 by default
MAX_LOOKUPS: Final = 8  # at one time; Bedrock throttles this API early
MAX_LOOKUPS_PER_CALLER: Final = 2  # of these, so that one caller's invented ARNs do not keep out the others'
TIMEOUT_SECONDS: Final = 3.0  # a call waits for it
MAX_ANSWER_BYTES: Final = 64 * 1024

_HEADERS: Final = (("accept", "application/json"),)
_UNKNOWN_STATUSES: Final = frozenset({400, 403, 404})  # no such profile, or none that this account may see

_log = logging.getLogger("price_keeper.forwarding")


class _LookupFailed(Exception):
    """The answer does not say which model it is; the message says why."""


class _Failure(NamedTuple):
    may_pass: bool
    seconds: float  # for which the profile is not looked up again


class ProfileModels:
    """Finds the models of application inference profiles in `regions`. `url_for` gives the address of Bedrock's control
    plane in a region."""

    def __init__(
        self, regions: Collection[str], url_for: Callable[[str], str], authorizer: Authorizer, clock: Clock
    ) -> None:
        self._regions = frozenset(regions)
        self._url_for = url_for
        self._authorizer = authorizer
        self._models = TTLCache[str, str](MAX_PROFILES, PROFILE_SECONDS, clock.monotonic)
        self._failures = TLRUCache[str, _Failure](
            MAX_PROFILES, lambda _, failure, now: now + failure.seconds, clock.monotonic
        )
        self._lookups = SingleFlight[str, None]()
        self._asking: dict[str, Caller] = {}  # by ARN: who started the lookup that is running
        self._incident = Incident(_log, clock.monotonic)

    async def find(self, arn: str, region: str, caller: Caller) -> str | None:
        """The base id of the profile's model; None if its region is not configured, if Bedrock says that there is no
        such profile, or does not permit to look it up. Raises UpstreamUnavailable while it cannot be known."""
        model = self._models.get(arn)
        if model is not None or region not in self._regions:
            return model
        if arn not in self._failures:
            if arn not in self._asking:
                self._check_may_ask(caller)
                self._asking[arn] = caller
            await self._lookups.get_or_load(arn, partial(self._load, arn, region))
            model = self._models.get(arn)
        failure = self._failures.get(arn)
        if model is None and failure is not None and failure.may_pass:
            message = "Bedrock does not say now which model this inference profile is of"
            raise UpstreamUnavailable(message, retry_after=failure.seconds)
        return model

    def _check_may_ask(self, caller: Caller) -> None:
        own = sum((each.org, each.app) == (caller.org, caller.app) for each in self._asking.values())
        if len(self._asking) >= MAX_LOOKUPS or own >= MAX_LOOKUPS_PER_CALLER:
            raise UpstreamUnavailable("too many inference profiles are looked up at once", retry_after=1)

    async def _load(self, arn: str, region: str) -> None:
        try:
            await self._look_up(arn, region)
        finally:
            del self._asking[arn]

    async def _look_up(self, arn: str, region: str) -> None:
        seconds = FAILURE_SECONDS
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                status, body = await self._ask(arn, region)
            if status == 200:
                self._models[arn] = _parse_model(body)
                return
            reason, may_pass = f"status {status}", status not in _UNKNOWN_STATUSES
        except _LookupFailed as failure:
            reason, may_pass = str(failure), False
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, UpstreamUnavailable) as failure:
            reason, may_pass = type(failure).__name__, True
            if isinstance(failure, TimeoutError):
                seconds = TIMEOUT_FAILURE_SECONDS
        self._failures[arn] = _Failure(may_pass, seconds)
        message = (
            "GetInferenceProfile failed for %s (%s); calls that name it are refused, or metered without a label. "
            "It needs the permission bedrock:GetInferenceProfile; an alias of a label needs no lookup"
        )
        self._incident.report(message, arn, reason)  # without an end: another profile's success would be none

    async def _ask(self, arn: str, region: str) -> tuple[int, bytes]:
        url = self._url_for(region)
        target = UpstreamTarget(parse_endpoint(url), region, arn, f"/inference-profiles/{encode_model_id(arn)}")
        host = format_host(target.endpoint)
        call = UpstreamCall("GET", "", _HEADERS, lambda _: b"", (target,))
        lines = self._authorizer.build_header_lines(call, target, host, b"").decode().splitlines()
        headers = dict(line.split(": ", 1) for line in lines) | {"host": host, **dict(_HEADERS)}
        tls = await asyncio.to_thread(get_client_context) if url.startswith("https:") else True
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
            session.get(URL(url + target.path, encoded=True), headers=headers, allow_redirects=False) as response,
        ):
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise _LookupFailed("the answer is too large")
            return response.status, bytes(body)


def _parse_model(body: bytes) -> str:
    models: set[Any] = set()
    with suppress(LookupError, TypeError, ValueError):
        models = {find_base_model(each["modelArn"]) for each in orjson.loads(body)["models"]}
    if len(models) != 1:
        raise _LookupFailed("an answer that does not name one model")
    return str(models.pop())
