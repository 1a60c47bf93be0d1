"""The control API on a port of its own, before a real store and flusher, with time that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.throttles import LookupThrottle
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_registry import BudgetRegistry
from price_keeper.clock import Clock
from price_keeper.config import Address, Config
from price_keeper.config.config_sections import parse_config
from price_keeper.control import api
from price_keeper.control.api_rate_limits import ApiRateDecision, ApiRateLimiter
from price_keeper.control.control_connections import DEFAULT_PORT_LIMITS, ControlPortLimits
from price_keeper.control.control_server import ControlDispatcher, open_control_port
from price_keeper.control.control_services import ControlServices, build_control_services
from price_keeper.control.readiness_checks import Readiness
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.client_secrets import use_cheap_hashes
from tests.support.clock import ManualClock
from tests.support.recording_harness import RecordingHarness, open_recording_harness

ADMIN_KEY = "the admin key of these tests, long enough"
ORG, OTHER = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5c"
API = f"/api/v1/orgs/{ORG}"
SETTINGS: dict[str, Any] = {
    "org_name": "Acme",
    "timezone": "UTC",
    "quota_scope": "APP",
    "model_ordering": ["premium", "economy"],
    "quotas": {"premium": 10_000_000, "economy": 2_000_000},
}
_CONFIG = """
unknown_org: meter
labels:
  premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 3, output: 15}}
  economy: {model: c.d, format: nova, prices_usd_per_1m: {input: 1, output: 5}}
"""
_SECRET = "what these tests sign their tokens with"


class TickingClock(ManualClock):
    """Time advances by a microsecond whenever it is read, and waiting for another writer takes none."""

    _reads = 0

    def now(self) -> float:
        self._reads += 1
        return super().now() + self._reads / 1e6

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.01))


class UnlimitedRates:
    """Rates that stop no caller."""

    async def take(self, caller: str) -> ApiRateDecision:
        return ApiRateDecision(1000, 999, 0.0)


@dataclass
class ControlResponse:
    status: int
    headers: Any
    body: Any
    raw: bytes


@dataclass
class ControlHarness:
    url: str
    session: aiohttp.ClientSession
    parts: ControlServices
    store: Store
    clock: Clock
    recording: RecordingHarness
    tokens: TokenService
    control: ControlDispatcher

    async def ask(
        self, method: str, path: str, body: Any = None, *, who: Any = "admin", **more: Any
    ) -> ControlResponse:
        """As the administrator, as the client of an org and app, or with None unauthenticated."""
        headers = {**self.auth_headers(who), **more.pop("headers", {})}
        body_arguments = {} if body is None else {"json": body}
        async with self.session.request(method, self.url + path, headers=headers, **body_arguments, **more) as answer:
            raw = await answer.read()
            is_json = answer.content_type == "application/json" and raw
            return ControlResponse(answer.status, answer.headers, await answer.json() if is_json else None, raw)

    def auth_headers(self, who: Any) -> dict[str, str]:
        if who is None:
            return {}
        if who == "admin":
            return {"X-API-Key": ADMIN_KEY}
        org, app = who
        return {"Authorization": f"Bearer {self.tokens.mint_access(org, app).token}"}

    async def put_org(self, org: str = ORG, **changes: Any) -> None:
        answer = await self.ask("PUT", f"/api/v1/orgs/{org}", SETTINGS | changes)
        assert answer.status in (200, 201), answer.body

    async def put_app(self, app: str = "shop", org: str = ORG, **changes: Any) -> None:
        answer = await self.ask("PUT", f"/api/v1/orgs/{org}/apps/{app}", {"app_name": app} | changes)
        assert answer.status in (200, 201), answer.body


def config() -> Config:
    return parse_config(_CONFIG, "config.yaml", {})


@asynccontextmanager
async def open_control_harness(
    store: Store,
    folder: Path,
    clock: Clock | None = None,
    rates: ApiRateLimiter | None = None,
    limits: ControlPortLimits = DEFAULT_PORT_LIMITS,
) -> AsyncIterator[ControlHarness]:
    """Hashes of secrets are cheap: no test guesses one."""
    with pytest.MonkeyPatch.context() as patch:
        use_cheap_hashes(patch)
        async with _open_control_port(
            store, folder, clock or TickingClock(), rates or UnlimitedRates(), limits
        ) as harness:
            yield harness


@asynccontextmanager
async def _open_control_port(
    store: Store, folder: Path, clock: Clock, rates: ApiRateLimiter, limits: ControlPortLimits
) -> AsyncIterator[ControlHarness]:
    full_config = config()
    tokens = TokenService([SigningKey("k1", "HS256", _SECRET, _SECRET)], "price-keeper", clock.now)
    readiness, telemetry = Readiness(clock), MetricsRegistry()
    async with open_recording_harness(folder / "journal", store, clock) as recording, Tasks(clock) as tasks:
        revocation = RevocationList(store, clock, tasks)
        budget_registry = BudgetRegistry(full_config, store, recording.flusher, clock, tasks)
        environ = {"PRICE_KEEPER_API_KEY": ADMIN_KEY}
        parts = build_control_services(
            full_config,
            environ,
            store,
            clock,
            budget_registry,
            tokens,
            revocation,
            ClientVerifier(store, clock.now, LookupThrottle(clock), clock.monotonic, tokens.secret_tagger),
            rates,
            limits=limits,
        )
        control = ControlDispatcher(api.build_routes(readiness, telemetry), clock.now)
        control.start(parts)
        readiness.start({})
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            open_control_port(control, Address("127.0.0.1", 0), clock, limits) as address,
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            yield ControlHarness(f"http://{address}", session, parts, store, clock, recording, tokens, control)
