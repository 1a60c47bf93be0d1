"""`GET /credentials` of a sidecar that cannot mint: the control service makes them, and they are kept for a while.

What is kept stands under a keyed hash of what the caller showed, so only whoever shows the same gets it, and a secret
that is wrong is always for the control service to refuse. Past half its life a token is asked for anew; when there is
no answer it goes on being handed out until it expires. One that was revoked is handed out no more.

To the control service all callers of a sidecar are one. So wrong secrets are counted here by who sent them, and who has
nothing kept here asks at his address's pace, which is below what the control service grants this sidecar. All who show
the same wait for one answer, and a refusal is remembered for a moment. Who has something that is good waits behind
nobody.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from price_keeper.auth.container import CredentialIssuer, IsDisconnected, IsRevoked, ProbableWrongSecret, parse_authorization, is_never_disconnected
from price_keeper.auth.failures import LoginThrottle, network_of
from price_keeper.auth.lookups import LookupThrottle, LookupRate
from price_keeper.auth.tokens import Claims, TokenService
from price_keeper.auth.waiting import Places, Shared
from price_keeper.clock import Clock
from price_keeper.errors import AccessDenied, Busy, PriceKeeperError, Refusal, TooManyRequests, TokenExpired
from price_keeper.model import scope_of_client

REMEMBERED = 10_000  # callers, and as many whose asking was in vain
WAITING = 1000  # who have nothing kept, for the control service; past this the answer would come too late
WAITING_OF_ONE = 250  # from one address, or with the same pair
STRANGERS_AT_ONCE = 24  # asked for; the other connections are for those who have something kept
ROOM_SECONDS = 1.0  # for one of those
PATIENCE_SECONDS = 1.0  # for a new one where an older one is still good: some SDKs wait for two
AGAIN_SECONDS = 2.0  # after it gave no answer, or refused, before it is asked once more
SLOW_REST_SECONDS = 10.0  # after patience was over, before the same caller's is asked for once more
STALE_REST_SECONDS = 15.0  # after it gave one past half its life, as where the clocks differ
LONGEST_REST_SECONDS = 60.0  # after it asked to slow down
ODD_SECONDS = 60.0  # between two lines in the log about answers that are none
TOLD = ("AccessKeyId", "SecretAccessKey", "Token", "Expiration")

# To the control service this sidecar is one address, which is granted 50 at once and 50 a second.
RELAY_RATE_PER_ADDRESS, RELAY_RATE_TOTAL = LookupRate(20, 10.0), LookupRate(40, 40.0)

_SECRET = re.compile(r"[!-~]{1,128}")
_BAD = "the client id or its secret is wrong"
_AWAY = "the control service, which makes credentials, cannot be reached; try again"
_REVOKED = "the token that the control service hands out was revoked, which it does not know yet; try again"
_NONE = "this sidecar hands out no credentials: auth.control_url does not say where they are made"

V = TypeVar("V")

_log = logging.getLogger("price_keeper.auth")


class NoAnswer(PriceKeeperError):
    """The control service is not itself, as the message says, or not there at all: `is_away`."""

    def __init__(self, why: str, *, is_away: bool = False) -> None:
        self.is_away = is_away
        super().__init__(why)


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes = field(repr=False)
    wait: float | None = None


Ask = Callable[[str], Awaitable[Reply]]  # with what the caller showed; raises NoAnswer


@dataclass(frozen=True, slots=True)
class _Kept:
    told: Mapping[str, str] = field(repr=False)
    claims: Claims
    rests_until: float = 0.0  # of the monotonic clock; until then no newer one is asked for

    @property
    def half(self) -> float:
        return (self.claims.issued + self.claims.expires) / 2


@dataclass(frozen=True, slots=True)
class _InVain:
    refusal: Refusal
    until: float  # of the monotonic clock


@dataclass(frozen=True, slots=True)
class _Wanted:
    ask: Ask
    mark: bytes
    client_id: str
    authorization: str = field(repr=False)


class CredentialRelay(CredentialIssuer):
    def __init__(
        self,
        ask: Ask | None,
        tokens: TokenService,
        clock: Clock,
        is_revoked: IsRevoked,
        login_throttle: LoginThrottle | None = None,
        lookup_throttle: LookupThrottle | None = None,
    ) -> None:
        """`ask` is None where nobody said who makes them."""
        super().__init__(login_throttle or LoginThrottle(clock.monotonic))
        self._lookup_throttle = lookup_throttle or LookupThrottle(clock, RELAY_RATE_PER_ADDRESS, RELAY_RATE_TOTAL)
        self._ask = ask
        self._tokens = tokens
        self._clock = clock
        self._is_revoked = is_revoked
        self._key = secrets.token_bytes(32)
        self._kept: dict[bytes, _Kept] = {}
        self._in_vain: dict[bytes, _InVain] = {}
        self._asking = Shared[_Kept]()
        self._places = Places(WAITING, WAITING_OF_ONE)
        self._room = asyncio.Semaphore(STRANGERS_AT_ONCE)
        self._away_until = 0.0  # of the monotonic clock
        self._odd_until = 0.0
        self._is_away = False

    def require_available(self) -> None:
        if self._ask is None:
            raise AccessDenied(_NONE)

    async def issue(self, authorization: str, address: str = "", is_disconnected: IsDisconnected = is_never_disconnected) -> Mapping[str, str]:
        if self._ask is None:
            raise AccessDenied(_NONE)
        client_id, secret = parse_authorization(authorization)
        if scope_of_client(client_id) is None or not _SECRET.fullmatch(secret):
            raise AccessDenied(_BAD)
        mark = hmac.digest(self._key, authorization.encode(), "sha256")
        wanted = _Wanted(self._ask, mark, client_id, authorization)
        kept = await self._good(mark)
        if kept is None:
            return (await self._of_stranger(wanted, address, is_disconnected)).told
        if not self._is_due(kept) or mark in self._asking:
            return kept.told
        return (await self._asking.told(mark, lambda: self._made(wanted, is_patient=False))).told

    async def _good(self, mark: bytes) -> _Kept | None:
        kept = self._kept.get(mark)
        if kept is None:
            return None
        if self._clock.now() >= kept.claims.expires or await self._is_revoked(kept.claims):
            if self._kept.get(mark) is kept:
                del self._kept[mark]
            return None
        return kept

    def _is_due(self, kept: _Kept) -> bool:
        return self._clock.now() >= kept.half and self._clock.monotonic() >= kept.rests_until

    # Who has nothing kept.

    async def _of_stranger(self, wanted: _Wanted, address: str, is_gone: IsDisconnected) -> _Kept:
        self._demand_hope(wanted.mark)
        about = (wanted.mark, network_of(address))
        with self._places.one(*about):
            try:
                return await self._asking.told(about, lambda: self._in_turn(wanted, address, is_gone))
            except _Gone:  # others who show the same go on
                raise Busy("nobody is left to be told", retry_after=AGAIN_SECONDS) from None

    async def _in_turn(self, wanted: _Wanted, address: str, is_gone: IsDisconnected) -> _Kept:
        """Whose turn it was is known by the address; the answer is for all who show the same, from wherever."""
        await self._lookup_throttle.wait_for_address(address)
        if is_gone():
            raise _Gone
        kept = await self._good(wanted.mark)
        if kept is not None:
            return kept
        self._demand_hope(wanted.mark)
        return await self._asking.told(wanted.mark, lambda: self._with_room(wanted))

    async def _with_room(self, wanted: _Wanted) -> _Kept:
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await self._room.acquire()
        except TimeoutError:
            raise Busy("the control service is asked for too many at once; try again", retry_after=2) from None
        try:
            return await self._made(wanted, is_patient=True)
        finally:
            self._room.release()

    def _demand_hope(self, mark: bytes) -> None:
        """Raises what the same was answered a moment ago."""
        if self._clock.monotonic() < self._away_until:
            raise Busy(_AWAY, retry_after=AGAIN_SECONDS)
        found = self._in_vain.get(mark)
        if found is not None and self._clock.monotonic() < found.until:
            raise found.refusal.with_traceback(None)

    # Asking.

    async def _made(self, wanted: _Wanted, *, is_patient: bool) -> _Kept:
        if self._clock.monotonic() < self._away_until:
            return await self._rested(wanted.mark, 0.0, Busy(_AWAY, retry_after=AGAIN_SECONDS))
        try:
            reply = await (wanted.ask(wanted.authorization) if is_patient else _soon(wanted))
            if reply.status == 429:
                return await self._slowed(wanted.mark, reply)
            if _is_ours(reply, 401, "unauthorized"):
                self._kept.pop(wanted.mark, None)
                raise self._noted(wanted.mark, AccessDenied(_BAD))
            made = self._understood(reply, wanted.client_id)
        except NoAnswer as failure:
            self._note_trouble(failure)
            seconds = SLOW_REST_SECONDS if isinstance(failure, _TooSlow) else AGAIN_SECONDS
            return await self._rested(wanted.mark, seconds, Busy(_AWAY, retry_after=AGAIN_SECONDS))
        self._note_back()
        if await self._is_revoked(made.claims):
            raise Busy(_REVOKED, retry_after=AGAIN_SECONDS)
        if self._is_due(made):
            made = replace(made, rests_until=self._clock.monotonic() + STALE_REST_SECONDS)
        _remember(self._kept, wanted.mark, made)
        return made

    async def _slowed(self, mark: bytes, reply: Reply) -> _Kept:
        """It says that to wrong secrets, of which there were too many: so to who is not known here, with reason."""
        wait = reply.wait or AGAIN_SECONDS
        kind = ProbableWrongSecret if _is_ours(reply, 429, "too_many_requests") else TooManyRequests
        refusal = kind("the control service asks to slow down", retry_after=wait)
        return await self._rested(mark, min(wait, LONGEST_REST_SECONDS), refusal)

    async def _rested(self, mark: bytes, seconds: float, refusal: Refusal) -> _Kept:
        """What is kept, for who has something: no newer one is asked for meanwhile. Raises the refusal for others."""
        kept = await self._good(mark)
        if kept is None:
            raise self._noted(mark, refusal)
        rested = replace(kept, rests_until=self._clock.monotonic() + seconds)
        _remember(self._kept, mark, rested)
        return rested

    def _noted(self, mark: bytes, refusal: Refusal) -> Refusal:
        """For whoever shows the same in a moment."""
        _remember(self._in_vain, mark, _InVain(refusal, self._clock.monotonic() + AGAIN_SECONDS))
        return refusal

    def _understood(self, reply: Reply, client_id: str) -> _Kept:
        """Raises NoAnswer. Nothing of the answer is told: it may be a token."""
        if reply.status != 200:
            raise NoAnswer(f"it answered {reply.status}")
        try:
            found = json.loads(reply.body)
            told = {name: found[name] for name in TOLD}
            claims = self._tokens.verify_access(told["Token"])
        except (AccessDenied, TokenExpired):
            raise NoAnswer(
                "it makes tokens that are not good here: compare auth.keys, auth.issuer and the clocks"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NoAnswer("its answer is no credentials") from None
        if claims.caller.client_id != client_id:
            raise NoAnswer("its answer is for another client")
        return _Kept(told, claims)

    def _note_trouble(self, failure: NoAnswer) -> None:
        moment = self._clock.monotonic()
        if failure.is_away:
            self._away_until = moment + AGAIN_SECONDS
            if not self._is_away:
                _log.warning("no new credentials can be had from the control service: %s", failure)
            self._is_away = True
        elif moment >= self._odd_until:
            self._odd_until = moment + ODD_SECONDS
            _log.warning("the control service was asked for credentials in vain: %s", failure)

    def _note_back(self) -> None:
        if self._is_away:
            _log.warning("the control service makes credentials again")
        self._is_away = False


class _Gone(Exception):
    """Whoever asked first."""


class _TooSlow(NoAnswer):
    """For who has something that is good."""


async def _soon(wanted: _Wanted) -> Reply:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await wanted.ask(wanted.authorization)
    except TimeoutError:
        raise _TooSlow(f"no answer within {PATIENCE_SECONDS:g} s") from None


def _is_ours(reply: Reply, status: int, error: str) -> bool:
    """Whether the control service itself says so: what stands before it may refuse with any page of its own."""
    if reply.status != status:
        return False
    try:
        found = json.loads(reply.body)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("error") == error and isinstance(found.get("request_id"), str)


def _remember(known: dict[bytes, V], mark: bytes, value: V) -> None:
    if len(known) >= REMEMBERED and mark not in known:
        for oldest in list(known)[: REMEMBERED // 2]:
            del known[oldest]
    known[mark] = value
