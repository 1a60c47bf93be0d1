"""`GET /credentials`: AWS credentials whose session token is an access token, so that SDKs refresh by themselves."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from proxy.answers import answer_json
from proxy.auth.clients import Clients
from proxy.auth.identify import AUTHORIZATION
from proxy.auth.tokens import Claims, Minted, Tokens
from proxy.errors import AccessDenied
from proxy.exchange import Header, Request, Responder
from proxy.model import Scope

REMEMBERED = 10_000  # tokens handed out that have more than half their life before them

# An SDK signs with these because it must; the signature proves nothing here, and the token everything.
_ACCESS_KEY = "PRICEKEEPERCALLER"
_SECRET_KEY = "the-signature-is-not-looked-at"  # noqa: S105 - no secret
_NOT_KEPT = (b"cache-control", b"no-store")


class ContainerCredentials:
    def __init__(
        self,
        clients: Clients,
        tokens: Tokens,
        now: Callable[[], float],
        is_revoked: Callable[[Claims], bool] = lambda _: False,
    ) -> None:
        """`is_revoked`: as far as that is known without asking anybody."""
        self._clients = clients
        self._tokens = tokens
        self._is_revoked = is_revoked
        self._now = now
        self._handed_out: dict[Scope, tuple[Minted, float]] = {}

    async def answer(self, request: Request, responder: Responder, more: tuple[Header, ...] = ()) -> None:
        """Raises AccessDenied, or what says that it cannot be told now."""
        if AUTHORIZATION in request.repeated:
            raise AccessDenied("a header that says who calls comes only once")
        given = request.headers.get(AUTHORIZATION, b"").decode("latin-1")
        client_id, colon, secret = given.partition(":")
        if not colon:
            raise AccessDenied("the container authorization token is client_id:client_secret")
        scope = await self._clients.check(client_id, secret)
        minted = self._token(scope)
        expiration = datetime.fromtimestamp(minted.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        credentials = {
            "AccessKeyId": _ACCESS_KEY,
            "SecretAccessKey": _SECRET_KEY,
            "Token": minted.token,
            "Expiration": expiration,
        }
        answer_json(responder, credentials, (_NOT_KEPT, *more))

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
