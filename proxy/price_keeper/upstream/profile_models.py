"""Which model an application inference profile is of: Bedrock's GetInferenceProfile, cached.

The ARN of such a profile does not name its model, and a profile never changes it. A lookup is shared by all who wait
for it (single-flight). Callers choose the ARNs, so the caches and the lookups at one time are bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import aiohttp
import orjson
from cachetools import TTLCache
from yarl import URL

from price_keeper.clock import Clock
from price_keeper.errors import UpstreamUnavailable
from price_keeper.model_ids import find_base_model
from price_keeper.operations import encode_model_id
from price_keeper.single_flight import SingleFlight
from price_keeper.upstream.forwarder import Authorizer, UpstreamCall, UpstreamTarget, format_host, parse_endpoint

PROFILE_SECONDS: Final = 3600.0  # how long an answer of Bedrock holds
FAILURE_SECONDS: Final = 10.0  # how long a profile that Bedrock did not name a model for is not looked up again
MAX_PROFILES: Final = 1000  # cached; an account has 1,000 by default
MAX_LOOKUPS: Final = 8  # at one time; Bedrock throttles this API early
TIMEOUT_SECONDS: Final = 3.0  # a call waits for it
LOG_INTERVAL_SECONDS: Final = 60.0  # between two log lines about lookups that failed
MAX_ANSWER_BYTES: Final = 64 * 1024

_HEADERS: Final = (("accept", "application/json"),)
_UNKNOWN_STATUSES: Final = frozenset({400, 403, 404})  # no such profile, or none that this account may see

_log = logging.getLogger("price_keeper.forwarding")


class _LookupFailed(Exception):
    """The answer does not say which model it is; the message says why."""


class ProfileModels:
    """Finds the models of application inference profiles. `url_for` gives the address of Bedrock's control plane in a
    region."""

    def __init__(self, url_for: Callable[[str], str], authorizer: Authorizer, clock: Clock) -> None:
        self._url_for = url_for
        self._authorizer = authorizer
        self._clock = clock
        self._models = TTLCache[str, str](MAX_PROFILES, PROFILE_SECONDS, clock.monotonic)
        self._failures = TTLCache[str, bool](MAX_PROFILES, FAILURE_SECONDS, clock.monotonic)  # whether it may pass
        self._lookups = SingleFlight[str, None]()
        self._logged_at = -LOG_INTERVAL_SECONDS

    async def find(self, arn: str, region: str) -> str | None:
        """The base id of the profile's model; None if Bedrock says that there is no such profile, or does not permit
        to look it up. Raises UpstreamUnavailable while it cannot be known."""
        model = self._models.get(arn)
        if model is not None:
            return model
        if arn not in self._failures:
            if len(self._lookups) >= MAX_LOOKUPS and arn not in self._lookups:
                raise UpstreamUnavailable("too many inference profiles are looked up at once", retry_after=1)
            await self._lookups.get_or_load(arn, partial(self._load, arn, region))
            model = self._models.get(arn)
        if model is None and self._failures.get(arn):
            message = "Bedrock does not say now which model this inference profile is of"
            raise UpstreamUnavailable(message, retry_after=FAILURE_SECONDS)
        return model

    async def _load(self, arn: str, region: str) -> None:
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
        self._failures[arn] = may_pass
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_INTERVAL_SECONDS:
            self._logged_at = now
            message = (
                "GetInferenceProfile failed for %s (%s); calls that name it are refused, or metered without a label. "
                "It needs the permission bedrock:GetInferenceProfile; an alias of a label needs no lookup"
            )
            _log.warning(message, arn, reason)

    async def _ask(self, arn: str, region: str) -> tuple[int, bytes]:
        url = self._url_for(region)
        target = UpstreamTarget(parse_endpoint(url), region, arn, f"/inference-profiles/{encode_model_id(arn)}")
        host = format_host(target.endpoint)
        call = UpstreamCall("GET", "", _HEADERS, lambda _: b"", (target,))
        lines = self._authorizer.build_header_lines(call, target, host, b"").decode().splitlines()
        headers = dict(line.split(": ", 1) for line in lines) | {"host": host, **dict(_HEADERS)}
        async with (
            aiohttp.ClientSession() as session,
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
