"""A control service that makes credentials for a sidecar, as a test wants it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from price_keeper.auth.container_credentials import IsRevoked
from price_keeper.auth.credential_relay import ControlReply, CredentialRelay
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import Claims, TokenService

from tests.support.clock import ManualClock

ORG = "550e8400-e29b-41d4-a716-446655440000"
WEB = f"org-{ORG}-app-web"
CREDENTIAL = f"{WEB}:the-secret-of-web"
KEY = "k" * 40


def error_reply(status: int, error: str, wait: float | None = None) -> ControlReply:
    """As the control API tells it."""
    document = {"error": error, "message": "x", "details": [], "timestamp": "2026-11-18T12:00:00Z", "request_id": "r1"}
    return ControlReply(status, json.dumps(document).encode(), wait)


UNAUTHORIZED = error_reply(401, "unauthorized")


class FakeControlService:
    """Makes a token whenever it is asked, or answers what a test says."""

    def __init__(self, clock: ManualClock, key: str = KEY) -> None:
        self.tokens = TokenService([SigningKey("k1", "HS256", key, key)], "price-keeper", clock.now)
        self.requests = Counter[str]()
        self.answer: ControlReply | Exception | None = None
        self.hangs = False
        self.hang_ends = asyncio.Event()
        self.accepted: set[str] | None = None  # who is refused nothing; None is everybody

    async def __call__(self, authorization: str) -> ControlReply:
        self.requests[authorization] += 1
        await (self.hang_ends.wait() if self.hangs else asyncio.sleep(0))
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.accepted is not None and authorization not in self.accepted:
            return UNAUTHORIZED
        return self.answer or self.issue(authorization.partition(":")[0].rpartition("-app-")[2])

    def issue(self, app: str, **more: Any) -> ControlReply:
        token = self.tokens.mint_access(ORG, app).token
        document = {"AccessKeyId": "A", "SecretAccessKey": "S", "Token": token, "Expiration": "2027-01-01T00:00:00Z"}
        return ControlReply(200, json.dumps(document | more).encode())


def revocation_check(revoked: set[str]) -> IsRevoked:
    async def is_revoked(claims: Claims) -> bool:
        return claims.jti in revoked

    return is_revoked


def new_relay(control: FakeControlService, clock: ManualClock, revoked: set[str]) -> CredentialRelay:
    """One that verifies what it makes."""
    verifying = TokenService([SigningKey("k1", "HS256", KEY, None)], "price-keeper", clock.now)
    return CredentialRelay(control, verifying, clock, revocation_check(revoked))
