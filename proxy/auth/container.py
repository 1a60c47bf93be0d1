"""`GET /credentials`: AWS credentials whose session token is an access token, so that SDKs refresh by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from proxy.answers import answer_json
from proxy.auth.clients import Clients
from proxy.auth.failures import WrongSecrets
from proxy.auth.identify import AUTHORIZATION
from proxy.auth.tokens import Claims, Minted, Tokens
from proxy.errors import AccessDenied, Busy
from proxy.exchange import Header, Request, Responder
from proxy.model import Scope

REMEMBERED = 10_000  # tokens handed out that have more than half their life before them

# An SDK signs with these because it must; the signature proves nothing here, and the token everything.
_ACCESS_KEY = "PRICEKEEPERCALLER"
_SECRET_KEY = "the-signature-is-not-looked-at"  # noqa: S105 - no secret
NO_KEY_SECONDS = 60  # before asking again; it takes another configuration
_NO_KEY = "no tokens can be made here: the first key of auth.keys is a public half alone; ask the control service"
_NO_PAIR = "the container authorization token is client_id:client_secret"
_NOT_KEPT = (b"cache-control", b"no-store")


class HandsOut(ABC):
    """Credentials for a client's id and secret, whoever makes them."""

    @abstractmethod
    async def told(self, authorization: str) -> Mapping[str, str]:
        """Raises AccessDenied, or what says that it cannot be told now."""

    async def told_to(self, address: str, authorization: str) -> Mapping[str, str]:  # noqa: ARG002
        """As `told`, to somebody at this address."""
        return await self.told(authorization)

    async def answer(self, request: Request, responder: Responder, more: tuple[Header, ...] = ()) -> None:
        """As `told`."""
        if AUTHORIZATION in request.repeated:
            raise AccessDenied("a header that says who calls comes only once")
        told = await self.told_to(request.peer, request.headers.get(AUTHORIZATION, b"").decode("latin-1"))
        answer_json(responder, told, (_NOT_KEPT, *more))


class ContainerCredentials(HandsOut):
    def __init__(
        self,
        clients: Clients,
        tokens: Tokens,
        now: Callable[[], float],
        is_revoked: Callable[[Claims], bool] = lambda _: False,
        wrong: WrongSecrets | None = None,
    ) -> None:
        """`is_revoked`: as far as that is known without asking anybody. `wrong` is shared by all who take secrets."""
        self._wrong = wrong
        self._clients = clients
        self._tokens = tokens
        self._is_revoked = is_revoked
        self._now = now
        self._handed_out: dict[Scope, tuple[Minted, float]] = {}

    async def told_to(self, address: str, authorization: str) -> Mapping[str, str]:
        """Raises SlowDown for too many wrong ones."""
        if self._wrong is None:
            return await self.told(authorization)
        client_id, is_pair, _ = authorization.partition(":")
        if not is_pair:
            self._wrong.count_unreadable(address)
            raise AccessDenied(_NO_PAIR)
        if not self._tokens.can_mint:
            raise Busy(_NO_KEY, retry_after=NO_KEY_SECONDS)
        if not self._clients.is_known(client_id):
            self._wrong.demand_room(address)
        try:
            return await self.told(authorization)
        except AccessDenied:
            self._wrong.count(client_id, address)
            raise

    async def told(self, authorization: str) -> Mapping[str, str]:
        scope = await self._clients.check(*shown(authorization))
        minted = self._token(scope)
        expiration = datetime.fromtimestamp(minted.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "AccessKeyId": _ACCESS_KEY,
            "SecretAccessKey": _SECRET_KEY,
            "Token": minted.token,
            "Expiration": expiration,
        }

    def _token(self, scope: Scope) -> Minted:
        """The same for every fetch until half its life is gone, since some clients fetch on every call."""
        known = self._handed_out.get(scope)
        if known is not None and self._now() < known[1] and not self._is_revoked(self._tokens.access(known[0].token)):
            return known[0]
        now = self._now()
        minted = self._tokens.mint(scope.org, scope.app)
        if len(self._handed_out) >= REMEMBERED:
            self._handed_out.clear()
        self._handed_out[scope] = (minted, now + (minted.expires - now) / 2)
        return minted


def shown(authorization: str) -> tuple[str, str]:
    """A client's id and secret. Raises AccessDenied."""
    client_id, colon, secret = authorization.partition(":")
    if not colon:
        raise AccessDenied(_NO_PAIR)
    return client_id, secret
