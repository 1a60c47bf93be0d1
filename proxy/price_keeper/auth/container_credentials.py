"""`GET /credentials`: AWS container credentials whose session token is an access token, so SDKs refresh by themselves.

`CredentialIssuer` is the interface; `LocalCredentialIssuer` mints tokens in this process. A sidecar without a
signing key uses `credential_relay.py`. A client gets the same credentials until half of their life has passed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cachetools import LRUCache

from price_keeper.auth.authenticate import AUTHORIZATION
from price_keeper.auth.client_secrets import MAX_STALE_RETRIES, ClientVerifier
from price_keeper.auth.throttles import LoginThrottle
from price_keeper.auth.tokens import SKEW_SECONDS, Claims, TokenService
from price_keeper.domain import Scope
from price_keeper.errors import AccessDenied, Busy, TooManyRequests
from price_keeper.exchange import Header, Request, Responder
from price_keeper.local_responses import send_json

MAX_CACHED_CREDENTIALS = 10_000

# SDKs sign with this key pair because they must. The signature proves nothing here; only the token counts.
_ACCESS_KEY = "PRICEKEEPERCALLER"
_SECRET_KEY = "the-signature-is-not-looked-at"
NO_SIGNING_KEY_RETRY_SECONDS = 60  # long, because only another configuration helps
_NO_SIGNING_KEY = (
    "this process cannot issue tokens, because auth.keys has no private key first; ask the control service"
)
_MALFORMED_PAIR = "the container authorization token is client_id:client_secret"
_NO_STORE = (b"cache-control", b"no-store")


IsRevoked = Callable[[Claims], Awaitable[bool]]  # False also if it cannot be known


class ProbableWrongSecret(TooManyRequests):
    """The secret is probably wrong, so the login throttle counts it as a failure."""


IsDisconnected = Callable[[], bool]  # whether the sender is gone; if so, no lookup is made for it alone


def is_never_disconnected() -> bool:
    """For senders whose connection is not observed."""
    return False


async def _is_never_revoked(_: Claims) -> bool:
    return False


class CredentialIssuer(ABC):
    """Issues credentials for a client's id and secret."""

    def __init__(self, login_throttle: LoginThrottle | None) -> None:
        """`login_throttle` is shared by everything that accepts secrets. None: the control service counts failures."""
        self._login_throttle = login_throttle

    @abstractmethod
    async def issue(
        self, authorization: str, address: str = "", is_disconnected: IsDisconnected = is_never_disconnected
    ) -> Mapping[str, str]:
        """Return credentials. Raises AccessDenied, or Busy or TooManyRequests if the secret cannot be checked now."""

    @abstractmethod
    def require_available(self) -> None:
        """Raise if no credentials can be issued here, whatever the secret."""

    async def issue_throttled(
        self, address: str, authorization: str, is_disconnected: IsDisconnected = is_never_disconnected
    ) -> Mapping[str, str]:
        """Like `issue`, and count failures of this client and address. Raises TooManyRequests after too many."""
        if self._login_throttle is None:
            return await self.issue(authorization, address, is_disconnected)
        client_id, is_pair, _ = authorization.partition(":")
        if not is_pair:
            self._login_throttle.count_malformed(address)
            raise AccessDenied(_MALFORMED_PAIR)
        self.require_available()
        try:
            return await self.issue(authorization, address, is_disconnected)
        except (AccessDenied, ProbableWrongSecret):
            self._login_throttle.count_failure(client_id, address)
            raise

    async def respond(self, request: Request, responder: Responder, response_headers: tuple[Header, ...] = ()) -> None:
        """Answer `GET /credentials`; raises like `issue_throttled`."""
        if AUTHORIZATION in request.repeated:
            raise AccessDenied("the headers with credentials may occur only once each")
        authorization = request.headers.get(AUTHORIZATION, b"").decode("latin-1")
        credentials = await self.issue_throttled(request.peer, authorization, lambda: responder.is_disconnected)
        send_json(responder, credentials, (_NO_STORE, *response_headers))


@dataclass(frozen=True, slots=True)
class _IssuedCredentials:
    credentials: Mapping[str, str] = field(repr=False)
    claims: Claims

    def is_reusable(self, now: float, generation: int) -> bool:
        """Whether to issue these again: until half of their life is over. Not if the clock was set back since, because
        this machine would reject their token as one from the future."""
        half_life_at = (self.claims.issued + self.claims.expires) / 2
        return self.claims.issued <= now + SKEW_SECONDS and now < half_life_at and self.claims.generation == generation


class LocalCredentialIssuer(CredentialIssuer):
    """Verifies the secret and mints the token in this process."""

    def __init__(
        self,
        clients: ClientVerifier,
        tokens: TokenService,
        now: Callable[[], float],
        is_revoked: IsRevoked = _is_never_revoked,
        login_throttle: LoginThrottle | None = None,
    ) -> None:
        super().__init__(login_throttle)
        self._clients = clients
        self._tokens = tokens
        self._is_revoked = is_revoked
        self._now = now
        self._issued = LRUCache[Scope, _IssuedCredentials](MAX_CACHED_CREDENTIALS)

    def require_available(self) -> None:
        if not self._tokens.can_mint:
            raise Busy(_NO_SIGNING_KEY, retry_after=NO_SIGNING_KEY_RETRY_SECONDS)

    async def issue(
        self, authorization: str, address: str = "", is_disconnected: IsDisconnected = is_never_disconnected
    ) -> Mapping[str, str]:
        """Return the same credentials until half of their life has passed, as some clients fetch on every call."""
        client_id, secret = parse_authorization(authorization)
        for _ in range(MAX_STALE_RETRIES):
            scope, generation = await self._clients.verify_with_generation(client_id, secret, address)
            issued = self._issued.get(scope)
            if issued is None or not issued.is_reusable(self._now(), generation):
                issued = self._mint(scope, generation)
            # New credentials are checked too: the client's generation known here may be a minute old.
            if not await self._is_revoked(issued.claims):
                return issued.credentials
            if self._issued.get(scope) is issued:  # otherwise a concurrent request has replaced them
                del self._issued[scope]
                self._clients.invalidate(scope)
        raise Busy("the tokens of this client keep being revoked; try again", retry_after=2)

    def _mint(self, scope: Scope, generation: int) -> _IssuedCredentials:
        minted = self._tokens.mint_access(scope.org, scope.app, generation=generation)
        expiration = datetime.fromtimestamp(minted.expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        credentials = {
            "AccessKeyId": _ACCESS_KEY,
            "SecretAccessKey": _SECRET_KEY,
            "Token": minted.token,
            "Expiration": expiration,
        }
        issued = self._issued[scope] = _IssuedCredentials(credentials, minted.claims)
        return issued


def parse_authorization(authorization: str) -> tuple[str, str]:
    """Split an Authorization value into a client's id and secret. Raises AccessDenied."""
    client_id, colon, secret = authorization.partition(":")
    if not colon:
        raise AccessDenied(_MALFORMED_PAIR)
    return client_id, secret
