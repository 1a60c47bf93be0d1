"""`GET /credentials` of a sidecar that cannot mint: the control service makes them, and they are kept for a while.

What is kept stands under a keyed hash of what the caller showed, so only whoever shows the same gets it, and a secret
that is wrong is always for the control service to refuse. Past half its life a token is asked for anew; when there is
no answer it goes on being handed out until it expires. One that was revoked is handed out no more.

Wrong secrets are counted here by who sent them, and who has nothing kept here asks at his address's pace: to the
control service all callers of a sidecar are one.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from proxy.auth.container import HandsOut, IsRevoked, shown
from proxy.auth.failures import WrongSecrets
from proxy.auth.lookups import Lookups
from proxy.auth.tokens import Claims, Tokens
from proxy.clock import Clock
from proxy.errors import AccessDenied, Busy, PriceKeeperError, SlowDown, TokenExpired
from proxy.model import scope_of_client

REMEMBERED = 10_000  # callers
WAITING = 1000  # for the control service; past this the answer would come too late
PATIENCE_SECONDS = 1.0  # for a new one where an older one is still good: some SDKs wait for two
AGAIN_SECONDS = 2.0  # after it gave no answer, before it is asked once more
LONGEST_REST_SECONDS = 60.0  # after it asked to slow down, before the same caller's is asked for once more
TOLD = ("AccessKeyId", "SecretAccessKey", "Token", "Expiration")

_SECRET = re.compile(r"[!-~]{1,128}")
_BAD = "the client id or its secret is wrong"
_AWAY = "the control service, which makes credentials, cannot be reached; try again"
_REVOKED = "the token that the control service hands out was revoked, which it does not know yet; try again"
_NONE = "this sidecar hands out no credentials: auth.control_url does not say where they are made"

_log = logging.getLogger("proxy.auth")


class NoAnswer(PriceKeeperError):
    """The control service is not there, or not itself; the message says why."""


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


class _Lane:
    """One at a time of those who show the same: the first one's answer is good for all."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0


class RelayedCredentials(HandsOut):
    def __init__(
        self,
        ask: Ask | None,
        tokens: Tokens,
        clock: Clock,
        is_revoked: IsRevoked,
        wrong: WrongSecrets | None = None,
        lookups: Lookups | None = None,
    ) -> None:
        """`ask` is None where nobody said who makes them."""
        super().__init__(wrong or WrongSecrets(clock.monotonic))
        self._lookups = lookups or Lookups(clock)
        self._ask = ask
        self._tokens = tokens
        self._clock = clock
        self._is_revoked = is_revoked
        self._key = secrets.token_bytes(32)
        self._kept: dict[bytes, _Kept] = {}
        self._lanes: dict[bytes, _Lane] = {}
        self._waiting = 0
        self._away_until = 0.0  # of the monotonic clock
        self._is_away = False

    def demand_source(self) -> None:
        if self._ask is None:
            raise AccessDenied(_NONE)

    async def told(self, authorization: str, address: str = "") -> Mapping[str, str]:
        if self._ask is None:
            raise AccessDenied(_NONE)
        client_id, secret = shown(authorization)
        if scope_of_client(client_id) is None or not _SECRET.fullmatch(secret):
            raise AccessDenied(_BAD)
        mark = hmac.digest(self._key, authorization.encode(), "sha256")
        known = await self._good(mark, is_fresh=True)
        if known is not None:
            return known.told
        async with self._lane(mark):
            known = await self._good(mark, is_fresh=True)
            if known is not None:
                return known.told
            if mark not in self._kept:
                await self._lookups.turn(address)
            return (await self._made(self._ask, mark, client_id, authorization)).told

    async def _good(self, mark: bytes, *, is_fresh: bool) -> _Kept | None:
        kept = self._kept.get(mark)
        if kept is None:
            return None
        if self._clock.now() >= kept.claims.expires or await self._is_revoked(kept.claims):
            if self._kept.get(mark) is kept:
                del self._kept[mark]
            return None
        is_old = self._clock.now() >= kept.half and self._clock.monotonic() >= kept.rests_until
        return None if is_fresh and is_old else kept

    async def _made(self, ask: Ask, mark: bytes, client_id: str, authorization: str) -> _Kept:
        if self._clock.monotonic() < self._away_until:
            return await self._old(mark)
        try:
            reply = await self._asked(ask, mark, authorization)
            if reply.status in (401, 403):
                self._kept.pop(mark, None)
                raise AccessDenied(_BAD)
            if reply.status == 429:
                return await self._rested(mark, reply.wait or AGAIN_SECONDS)
            kept = self._understood(reply, client_id)
        except NoAnswer as failure:
            self._note_away(str(failure))
            return await self._old(mark)
        self._note_back()
        if await self._is_revoked(kept.claims):
            raise Busy(_REVOKED, retry_after=AGAIN_SECONDS)
        self._remember(mark, kept)
        return kept

    async def _rested(self, mark: bytes, wait: float) -> _Kept:
        """What is kept, for who has something: others made the control service ask to slow down."""
        kept = await self._good(mark, is_fresh=False)
        if kept is None:
            raise SlowDown("the control service asks to slow down", retry_after=wait)
        rested = replace(kept, rests_until=self._clock.monotonic() + min(wait, LONGEST_REST_SECONDS))
        self._remember(mark, rested)
        return rested

    async def _asked(self, ask: Ask, mark: bytes, authorization: str) -> Reply:
        is_old_good = await self._good(mark, is_fresh=False) is not None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS if is_old_good else None):
                return await ask(authorization)
        except TimeoutError:
            raise NoAnswer(f"no answer within {PATIENCE_SECONDS:g} s") from None

    async def _old(self, mark: bytes) -> _Kept:
        kept = await self._good(mark, is_fresh=False)
        if kept is None:
            raise Busy(_AWAY, retry_after=AGAIN_SECONDS)
        return kept

    def _understood(self, reply: Reply, client_id: str) -> _Kept:
        """Raises NoAnswer. Nothing of the answer is told: it may be a token."""
        if reply.status != 200:
            raise NoAnswer(f"it answered {reply.status}")
        try:
            found = json.loads(reply.body)
            told = {name: found[name] for name in TOLD}
            claims = self._tokens.access(told["Token"])
        except (AccessDenied, TokenExpired):
            raise NoAnswer(
                "it makes tokens that are not good here: compare auth.keys, auth.issuer and the clocks"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NoAnswer("its answer is no credentials") from None
        if claims.caller.client_id != client_id:
            raise NoAnswer("its answer is for another client")
        return _Kept(told, claims)

    def _remember(self, mark: bytes, kept: _Kept) -> None:
        if len(self._kept) >= REMEMBERED and mark not in self._kept:
            for oldest in list(self._kept)[: REMEMBERED // 2]:
                del self._kept[oldest]
        self._kept[mark] = kept

    def _note_away(self, why: str) -> None:
        self._away_until = self._clock.monotonic() + AGAIN_SECONDS
        if not self._is_away:
            _log.warning("no new credentials can be had from the control service: %s", why)
        self._is_away = True

    def _note_back(self) -> None:
        if self._is_away:
            _log.warning("the control service makes credentials again")
        self._is_away = False

    @asynccontextmanager
    async def _lane(self, mark: bytes) -> AsyncIterator[None]:
        if self._waiting >= WAITING:
            raise Busy("too many callers wait for credentials", retry_after=AGAIN_SECONDS)
        lane = self._lanes.setdefault(mark, _Lane())
        self._waiting += 1
        lane.waiting += 1
        try:
            async with lane.turn:
                yield
        finally:
            self._waiting -= 1
            lane.waiting -= 1
            if not lane.waiting:
                del self._lanes[mark]
