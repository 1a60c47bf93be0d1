"""`GET /credentials`: AWS credentials whose session token is an access token, so that SDKs refresh by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from price_keeper.answers import send_json
from price_keeper.auth.clients import MAX_STALE_RETRIES, ClientVerifier
from price_keeper.auth.failures import LoginThrottle
from price_keeper.auth.identify import AUTHORIZATION
from price_keeper.auth.tokens import SKEW_SECONDS, Claims, TokenService
from price_keeper.errors import AccessDenied, Busy, TooManyRequests
from price_keeper.exchange import Header, Request, Responder
from price_keeper.model import Scope

REMEMBERED = 10_000  # tokens handed out that have more than half their life before them

# An SDK signs with these because it must; the signature proves nothing here, and the token everything.
_ACCESS_KEY = "PRICEKEEPERCALLER"
_SECRET_KEY = "the-signature-is-not-looked-at"  # noqa: S105 - no secret
NO_KEY_SECONDS = 60  # before asking again; it takes another configuration
_NO_KEY = "no tokens can be made here: the first key of auth.keys is a public half alone; ask the control service"
_NO_PAIR = "the container authorization token is client_id:client_secret"
_NOT_KEPT = (b"cache-control", b"no-store")


IsRevoked = Callable[[Claims], Awaitable[bool]]  # as far as it can be told


class Suspected(TooManyRequests):
    """In all likelihood for a wrong secret: so it is counted as one."""


IsGone = Callable[[], bool]  # who asked: then it is not found out for him alone


def stays() -> bool:
    """Of whom it is not known."""
    return False


async def _none_is(_: Claims) -> bool:
    return False


class HandsOut(ABC):
    """Credentials for a client's id and secret, whoever makes them."""

    def __init__(self, login_throttle: LoginThrottle | None) -> None:
        """`wrong` is shared by all who take secrets; None is for who counts wrong ones himself."""
        self._login_throttle = login_throttle

    @abstractmethod
    async def told(self, authorization: str, address: str = "", is_gone: IsGone = stays) -> Mapping[str, str]:
        """Raises AccessDenied, or what says that it cannot be told now."""

    @abstractmethod
    def demand_source(self) -> None:
        """Raises where nobody is told anything, whatever he shows."""

    async def told_to(self, address: str, authorization: str, is_gone: IsGone = stays) -> Mapping[str, str]:
        """As `told`, to somebody at this address. Raises SlowDown for too many wrong ones."""
        if self._login_throttle is None:
            return await self.told(authorization, address, is_gone)
        client_id, is_pair, _ = authorization.partition(":")
        if not is_pair:
            self._login_throttle.count_malformed(address)
            raise AccessDenied(_NO_PAIR)
        self.demand_source()
        try:
            return await self.told(authorization, address, is_gone)
        except (AccessDenied, Suspected):
            self._login_throttle.count_failure(client_id, address)
            raise

    async def answer(self, request: Request, responder: Responder, more: tuple[Header, ...] = ()) -> None:
        """As `told`."""
        if AUTHORIZATION in request.repeated:
            raise AccessDenied("a header that says who calls comes only once")
        authorization = request.headers.get(AUTHORIZATION, b"").decode("latin-1")
        told = await self.told_to(request.peer, authorization, lambda: responder.is_disconnected)
        send_json(responder, told, (_NOT_KEPT, *more))


@dataclass(frozen=True, slots=True)
class _Made:
    told: Mapping[str, str] = field(repr=False)
    claims: Claims

    def is_good(self, now: float, generation: int) -> bool:
        """Also where the clock was set back: a token from the future is good nowhere on this machine."""
        half = (self.claims.issued + self.claims.expires) / 2
        return self.claims.issued <= now + SKEW_SECONDS and now < half and self.claims.generation == generation


class ContainerCredentials(HandsOut):
    def __init__(
        self,
        clients: ClientVerifier,
        tokens: TokenService,
        now: Callable[[], float],
        is_revoked: IsRevoked = _none_is,
        login_throttle: LoginThrottle | None = None,
    ) -> None:
        super().__init__(login_throttle)
        self._clients = clients
        self._tokens = tokens
        self._is_revoked = is_revoked
        self._now = now
        self._made: dict[Scope, _Made] = {}

    def demand_source(self) -> None:
        if not self._tokens.can_mint:
            raise Busy(_NO_KEY, retry_after=NO_KEY_SECONDS)

    async def told(self, authorization: str, address: str = "", is_gone: IsGone = stays) -> Mapping[str, str]:  # noqa: ARG002
        """The same for every fetch until half its life is gone, since some clients fetch on every call."""
        client_id, secret = shown(authorization)
        for _ in range(MAX_STALE_RETRIES):
            scope, generation = await self._clients.verify_with_generation(client_id, secret, address)
            made = self._made.get(scope)
            if made is None or not made.is_good(self._now(), generation):
                made = self._make(scope, generation)
            # A new one too: what is known here of the client's generation may be a minute old.
            if not await self._is_revoked(made.claims):
                return made.told
            if self._made.get(scope) is made:  # else somebody else has found that out
                del self._made[scope]
                self._clients.invalidate(scope)
        raise Busy("the tokens of this client are revoked all the time; try again", retry_after=2)

    def _make(self, scope: Scope, generation: int) -> _Made:
        minted = self._tokens.mint_access(scope.org, scope.app, generation=generation)
        expiration = datetime.fromtimestamp(minted.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = {
            "AccessKeyId": _ACCESS_KEY,
            "SecretAccessKey": _SECRET_KEY,
            "Token": minted.token,
            "Expiration": expiration,
        }
        if len(self._made) >= REMEMBERED:
            self._made.clear()
        made = self._made[scope] = _Made(told, minted.claims)
        return made


def shown(authorization: str) -> tuple[str, str]:
    """A client's id and secret. Raises AccessDenied."""
    client_id, colon, secret = authorization.partition(":")
    if not colon:
        raise AccessDenied(_NO_PAIR)
    return client_id, secret
