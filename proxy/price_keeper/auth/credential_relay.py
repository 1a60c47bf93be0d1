"""`GET /credentials` of a sidecar that cannot mint tokens: fetched from the control service and cached.

Credentials are cached under a keyed hash of the id and secret that the caller showed, so only the same pair gets
them, and only the control service decides whether a secret is wrong. Past half of its life a token is refreshed;
while that fails the cached one is used until it expires. A revoked one is never handed out again.

To the control service all callers of a sidecar are one address. So wrong secrets are counted here per sender, and
first fetches pass a lookup throttle below what the control service allows this sidecar. Callers with the same pair
share one request (single-flight), and a refusal is cached for a moment. A caller with valid cached credentials never
waits for others.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from cachetools import TLRUCache, TTLCache

from price_keeper.auth.container_credentials import (
    CredentialIssuer,
    IsDisconnected,
    IsRevoked,
    ProbableWrongSecret,
    is_never_disconnected,
    parse_authorization,
)
from price_keeper.auth.throttles import LoginThrottle, LookupRate, LookupThrottle, network_of
from price_keeper.auth.tokens import Claims, TokenService
from price_keeper.clock import Clock
from price_keeper.domain import parse_client_id
from price_keeper.errors import AccessDenied, Busy, PriceKeeperError, Refusal, TokenExpired, TooManyRequests
from price_keeper.single_flight import SingleFlight

MAX_CACHED_CALLERS = 10_000  # callers, and as many recent refusals
MAX_WAITERS = 1000  # callers that wait for a first fetch; further ones would be answered too late
MAX_WAITERS_PER_KEY = 250  # from one address, or with the same pair
MAX_FIRST_FETCHES = 24  # first fetches in flight; the other connections are for refreshes
SLOT_TIMEOUT_SECONDS = 1.0  # for one of these slots
REFRESH_TIMEOUT_SECONDS = 1.0  # for a refresh while the cached token is valid: some SDKs wait for only two seconds
CONTROL_RETRY_SECONDS = 2.0  # after it did not answer, or refused, before it is asked again
SLOW_REFRESH_PAUSE_SECONDS = 10.0  # after a refresh timed out, before the next one of the same caller
STALE_REFRESH_PAUSE_SECONDS = 15.0  # after it returned a token past half of its life, for example when clocks differ
MAX_REFRESH_PAUSE_SECONDS = 60.0  # after it asked to slow down
FAILURE_LOG_SECONDS = 60.0  # between two log lines about unusable replies
CREDENTIAL_FIELDS = ("AccessKeyId", "SecretAccessKey", "Token", "Expiration")

# To the control service this sidecar is one address, which may make 50 lookups at once and 50 a second.
RELAY_RATE_PER_ADDRESS, RELAY_RATE_TOTAL = LookupRate(20, 10.0), LookupRate(40, 40.0)

_SHOWN_SECRET_FORMAT = re.compile(r"[!-~]{1,128}")
_WRONG_SECRET = "the client id or its secret is wrong"
_CONTROL_AWAY = "the control service, which issues credentials, cannot be reached; try again"
_TOKEN_REVOKED = "the control service returned a revoked token, as it does not know of the revocation yet; try again"
_NOT_CONFIGURED = "this sidecar cannot issue credentials; set auth.control_url to the URL of the control service"

_log = logging.getLogger("price_keeper.auth")


class ControlServiceFailed(PriceKeeperError):
    """The control service returned no usable answer, as the message says; or cannot be reached: `is_away`."""

    def __init__(self, reason: str, *, is_away: bool = False) -> None:
        self.is_away = is_away
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ControlReply:
    status: int
    body: bytes = field(repr=False)
    retry_after: float | None = None


AskControlService = Callable[[str], Awaitable[ControlReply]]  # takes the Authorization; raises ControlServiceFailed


@dataclass(frozen=True, slots=True)
class _RelayedCredentials:
    credentials: Mapping[str, str] = field(repr=False)
    claims: Claims
    rests_until: float = 0.0  # on the monotonic clock; no refresh before that

    @property
    def half_life_at(self) -> float:
        return (self.claims.issued + self.claims.expires) / 2


@dataclass(frozen=True, slots=True)
class _RelayRequest:
    ask: AskControlService
    cache_key: bytes
    client_id: str
    authorization: str = field(repr=False)


class CredentialRelay(CredentialIssuer):
    """Issues credentials that the control service makes."""

    def __init__(
        self,
        ask: AskControlService | None,
        tokens: TokenService,
        clock: Clock,
        is_revoked: IsRevoked,
        login_throttle: LoginThrottle | None = None,
        lookup_throttle: LookupThrottle | None = None,
    ) -> None:
        """`ask` is None if `auth.control_url` is not configured; then every request is refused."""
        super().__init__(login_throttle or LoginThrottle(clock.monotonic))
        self._lookup_throttle = lookup_throttle or LookupThrottle(clock, RELAY_RATE_PER_ADDRESS, RELAY_RATE_TOTAL)
        self._ask = ask
        self._tokens = tokens
        self._clock = clock
        self._is_revoked = is_revoked
        self._digest_key = secrets.token_bytes(32)
        self._cached = TLRUCache[bytes, _RelayedCredentials](
            MAX_CACHED_CALLERS, lambda _key, relayed, _now: relayed.claims.expires, timer=clock.now
        )
        self._recent_refusals = TTLCache[bytes, Refusal](
            MAX_CACHED_CALLERS, CONTROL_RETRY_SECONDS, timer=clock.monotonic
        )
        self._single_flight = SingleFlight[Hashable, _RelayedCredentials]()
        self._waiters = WaiterLimit(MAX_WAITERS, MAX_WAITERS_PER_KEY)
        self._first_fetch_slots = asyncio.Semaphore(MAX_FIRST_FETCHES)
        self._away_until = 0.0  # on the monotonic clock
        self._quiet_until = 0.0
        self._is_away = False

    def require_available(self) -> None:
        if self._ask is None:
            raise AccessDenied(_NOT_CONFIGURED)

    async def issue(
        self, authorization: str, address: str = "", is_disconnected: IsDisconnected = is_never_disconnected
    ) -> Mapping[str, str]:
        if self._ask is None:
            raise AccessDenied(_NOT_CONFIGURED)
        client_id, secret = parse_authorization(authorization)
        if parse_client_id(client_id) is None or not _SHOWN_SECRET_FORMAT.fullmatch(secret):
            raise AccessDenied(_WRONG_SECRET)
        cache_key = hmac.digest(self._digest_key, authorization.encode(), "sha256")
        wanted_request = _RelayRequest(self._ask, cache_key, client_id, authorization)
        cached = await self._get_cached(cache_key)
        if cached is None:
            return (await self._fetch_first(wanted_request, address, is_disconnected)).credentials
        if not self._needs_refresh(cached) or cache_key in self._single_flight:
            return cached.credentials
        return (
            await self._single_flight.get_or_load(cache_key, lambda: self._fetch(wanted_request, is_patient=False))
        ).credentials

    async def _get_cached(self, cache_key: bytes) -> _RelayedCredentials | None:
        cached = self._cached.get(cache_key)
        if cached is not None and await self._is_revoked(cached.claims):
            if self._cached.get(cache_key) is cached:
                self._cached.pop(cache_key, None)
            return None
        return cached

    def _needs_refresh(self, cached: _RelayedCredentials) -> bool:
        return self._clock.now() >= cached.half_life_at and self._clock.monotonic() >= cached.rests_until

    # Callers without cached credentials.

    async def _fetch_first(
        self, wanted_request: _RelayRequest, address: str, is_disconnected: IsDisconnected
    ) -> _RelayedCredentials:
        self._raise_recent_refusal(wanted_request.cache_key)
        flight_key = (wanted_request.cache_key, network_of(address))
        with self._waiters.hold(*flight_key):
            while True:
                try:
                    return await self._single_flight.get_or_load(
                        flight_key, lambda: self._fetch_throttled(wanted_request, address, is_disconnected)
                    )
                except _Disconnected:  # the caller that started the fetch; others with the same pair go on
                    if is_disconnected():
                        raise Busy("the client has disconnected", retry_after=CONTROL_RETRY_SECONDS) from None

    async def _fetch_throttled(
        self, wanted_request: _RelayRequest, address: str, is_disconnected: IsDisconnected
    ) -> _RelayedCredentials:
        """Wait for a turn of this address, then fetch. All callers with the same pair share the result."""
        await self._lookup_throttle.wait_for_address(address)
        if is_disconnected():
            raise _Disconnected
        cached = await self._get_cached(wanted_request.cache_key)
        if cached is not None:
            return cached
        self._raise_recent_refusal(wanted_request.cache_key)
        return await self._single_flight.get_or_load(
            wanted_request.cache_key, lambda: self._fetch_with_slot(wanted_request)
        )

    async def _fetch_with_slot(self, wanted_request: _RelayRequest) -> _RelayedCredentials:
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_SECONDS):
                await self._first_fetch_slots.acquire()
        except TimeoutError:
            raise Busy("too many first fetches from the control service; try again", retry_after=2) from None
        try:
            return await self._fetch(wanted_request, is_patient=True)
        finally:
            self._first_fetch_slots.release()

    def _raise_recent_refusal(self, cache_key: bytes) -> None:
        """Raise the refusal that the same pair got a moment ago."""
        if self._clock.monotonic() < self._away_until:
            raise Busy(_CONTROL_AWAY, retry_after=CONTROL_RETRY_SECONDS)
        refusal = self._recent_refusals.get(cache_key)
        if refusal is not None:
            raise refusal.with_traceback(None)

    # Requests to the control service.

    async def _fetch(self, wanted_request: _RelayRequest, *, is_patient: bool) -> _RelayedCredentials:
        if self._clock.monotonic() < self._away_until:
            return await self._fall_back_to_cached(
                wanted_request.cache_key, 0.0, Busy(_CONTROL_AWAY, retry_after=CONTROL_RETRY_SECONDS)
            )
        try:
            reply = await (
                wanted_request.ask(wanted_request.authorization)
                if is_patient
                else _ask_with_short_timeout(wanted_request)
            )
            if reply.status == 429:
                return await self._handle_slow_down(wanted_request.cache_key, reply)
            if _is_from_control_service(reply, 401, "unauthorized"):
                self._cached.pop(wanted_request.cache_key, None)
                raise self._remember_refusal(wanted_request.cache_key, AccessDenied(_WRONG_SECRET))
            fetched = self._parse_reply(reply, wanted_request.client_id)
        except ControlServiceFailed as failure:
            self._note_failure(failure)
            seconds = SLOW_REFRESH_PAUSE_SECONDS if isinstance(failure, _ReplyTimeout) else CONTROL_RETRY_SECONDS
            return await self._fall_back_to_cached(
                wanted_request.cache_key, seconds, Busy(_CONTROL_AWAY, retry_after=CONTROL_RETRY_SECONDS)
            )
        self._note_recovery()
        if await self._is_revoked(fetched.claims):
            raise Busy(_TOKEN_REVOKED, retry_after=CONTROL_RETRY_SECONDS)
        if self._needs_refresh(fetched):
            fetched = replace(fetched, rests_until=self._clock.monotonic() + STALE_REFRESH_PAUSE_SECONDS)
        self._cached[wanted_request.cache_key] = fetched
        return fetched

    async def _handle_slow_down(self, cache_key: bytes, reply: ControlReply) -> _RelayedCredentials:
        """Handle a 429. The control service sends it after too many wrong secrets, so a caller without cached
        credentials probably has a wrong one."""
        wait = reply.retry_after or CONTROL_RETRY_SECONDS
        kind = ProbableWrongSecret if _is_from_control_service(reply, 429, "too_many_requests") else TooManyRequests
        refusal = kind("the control service asks to slow down", retry_after=wait)
        return await self._fall_back_to_cached(cache_key, min(wait, MAX_REFRESH_PAUSE_SECONDS), refusal)

    async def _fall_back_to_cached(self, cache_key: bytes, seconds: float, refusal: Refusal) -> _RelayedCredentials:
        """Return the cached credentials, and pause their refreshes; raise the refusal if there are none."""
        cached = await self._get_cached(cache_key)
        if cached is None:
            raise self._remember_refusal(cache_key, refusal)
        rested = replace(cached, rests_until=self._clock.monotonic() + seconds)
        self._cached[cache_key] = rested
        return rested

    def _remember_refusal(self, cache_key: bytes, refusal: Refusal) -> Refusal:
        """Remember the refusal for the next request with the same pair, and return it."""
        self._recent_refusals[cache_key] = refusal
        return refusal

    def _parse_reply(self, reply: ControlReply, client_id: str) -> _RelayedCredentials:
        """Raises ControlServiceFailed. Its message quotes nothing of the reply, which may be a token."""
        if reply.status != 200:
            raise ControlServiceFailed(f"it answered {reply.status}")
        try:
            document = json.loads(reply.body)
            credentials = {name: document[name] for name in CREDENTIAL_FIELDS}
            claims = self._tokens.verify_access(credentials["Token"])
        except (AccessDenied, TokenExpired):
            raise ControlServiceFailed(
                "its tokens are not valid here: compare auth.keys, auth.issuer and the clocks"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ControlServiceFailed("its answer has no credentials") from None
        if claims.caller.client_id != client_id:
            raise ControlServiceFailed("its answer is for another client")
        return _RelayedCredentials(credentials, claims)

    def _note_failure(self, failure: ControlServiceFailed) -> None:
        moment = self._clock.monotonic()
        if failure.is_away:
            self._away_until = moment + CONTROL_RETRY_SECONDS
            if not self._is_away:
                _log.warning(
                    "cannot fetch credentials from the control service: %s; cached ones are used until they expire",
                    failure,
                )
            self._is_away = True
        elif moment >= self._quiet_until:
            self._quiet_until = moment + FAILURE_LOG_SECONDS
            _log.warning(
                "the control service returned no usable credentials: %s; cached ones are used until they expire",
                failure,
            )

    def _note_recovery(self) -> None:
        if self._is_away:
            _log.info("the control service issues credentials again")
        self._is_away = False


class _Disconnected(Exception):
    """The caller that started a fetch has disconnected."""


class _ReplyTimeout(ControlServiceFailed):
    """A refresh took too long; the cached credentials are still valid."""


async def _ask_with_short_timeout(wanted_request: _RelayRequest) -> ControlReply:
    try:
        async with asyncio.timeout(REFRESH_TIMEOUT_SECONDS):
            return await wanted_request.ask(wanted_request.authorization)
    except TimeoutError:
        raise _ReplyTimeout(f"no answer within {REFRESH_TIMEOUT_SECONDS:g} s") from None


def _is_from_control_service(reply: ControlReply, status: int, error: str) -> bool:
    """Whether the control service itself sent this; a proxy in front of it may refuse with a page of its own."""
    if reply.status != status:
        return False
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("error") == error and isinstance(document.get("request_id"), str)


class WaiterLimit:
    """Limits how many callers may wait, in total and per key."""

    def __init__(self, total: int, per_key: int) -> None:
        self._max_total = total
        self._max_per_key = per_key
        self._count_by_key = Counter[Hashable]()
        self.waiting = 0

    @contextmanager
    def hold(self, *keys: Hashable) -> Iterator[None]:
        """Count a waiting caller for each of these keys. Raises Busy."""
        if self.waiting >= self._max_total or any(self._count_by_key[key] >= self._max_per_key for key in keys):
            raise Busy("too many callers wait for credentials", retry_after=2)
        self.waiting += 1
        self._count_by_key.update(keys)
        try:
            yield
        finally:
            self.waiting -= 1
            self._count_by_key.subtract(keys)
            for key in keys:
                if not self._count_by_key[key]:
                    del self._count_by_key[key]
