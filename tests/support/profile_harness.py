"""The data port with the control API beside it, on one store: profiles are made as administrators make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from price_keeper.auth.client_secrets import ClientVerifier
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.config import Address, Config
from price_keeper.control import api
from price_keeper.control.control_server import ControlDispatcher, open_control_port
from price_keeper.control.control_services import build_control_services
from price_keeper.control.readiness_checks import Readiness
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value
from price_keeper.tasks import Tasks
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.budget_fleet import CountingStore
from tests.support.clock import ShiftedClock
from tests.support.control_harness import ADMIN_KEY, UnlimitedRates
from tests.support.data_port import APP, ORG, SECRET, TOKEN_SECONDS, DataPort, data_port

REGION = "eu-west-1"
ARN = f"arn:aws:bedrock:{REGION}:123456789012:application-inference-profile/abc123"
ENCODED = ARN.replace(":", "%3A").replace("/", "%2F")
PRICES = {"input": 2, "output": 7}
CLAUDE_PRICES = PRICES | {"cache_read": 1, "cache_write_5m": 3, "cache_write_1h": 4}


@dataclass
class ProfileHarness:
    port: DataPort
    store: CountingStore
    clock: ShiftedClock
    tokens: TokenService
    session: aiohttp.ClientSession
    control: str
    tokens_by_app: dict[str | None, str] = field(default_factory=dict)  # the tokens, by app

    async def ask_as_admin(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = f"{self.control}/api/v1/orgs/{ORG}{path}"
        async with self.session.request(method, url, json=body, headers={"X-API-Key": ADMIN_KEY}) as answer:
            return answer.status, await answer.json()

    async def make_profile(self, label: str = "fast", app: str = APP, **changes: Any) -> None:
        settings = {"inference_profile_arn": ARN, "format": "nova", "prices_usd_per_1m": PRICES}
        body = {"label": label, **settings, **changes}
        status, document = await self.ask_as_admin("POST", f"/apps/{app}/inference-profiles", body)
        assert status in (200, 201), document

    def expire_cache(self) -> None:
        """What was made here is heard of as what another process made: not before it is read again."""
        for entry in self.port.budget_registry.app_labels._entries.values():
            entry.stale_at = entry.refresh_at = self.clock.monotonic() + 60

    async def put_org(self, **settings: Any) -> None:
        status, document = await self.ask_as_admin("PUT", "", {"org_name": "Acme", "timezone": "UTC", **settings})
        assert status in (200, 201), document

    async def put_app(self, app: str = APP, **settings: Any) -> None:
        status, document = await self.ask_as_admin("PUT", f"/apps/{app}", {"app_name": app, **settings})
        assert status in (200, 201), document

    async def ask(
        self, model: str = "fast", operation: str = "converse", app: str | None = APP, **arguments: Any
    ) -> Any:
        """With boto3, whose streams are read to their end."""
        self.port.token = self.tokens_by_app.get(app) or self.tokens.mint_access(ORG, app, TOKEN_SECONDS).token
        self.tokens_by_app[app] = self.port.token
        headers = arguments.pop("headers", {})
        client = self.port.client(**headers)

        def call() -> Any:
            answer = getattr(client, operation)(modelId=model, **arguments)
            for name in ("stream", "body"):
                if name in answer:
                    answer[name] = list(answer[name])
            client.close()
            return answer["ResponseMetadata"]["HTTPHeaders"]

        return await asyncio.to_thread(call)

    async def put_org_without_budget(self) -> None:
        """An org without a chain, with the apps `web` and `other`."""
        await self.store._store.put(Put(schema.org_config_key(ORG), {"org_name": "Acme"}))
        for app in (APP, "other"):
            settings: dict[str, Value] = {"app_name": app}
            await self.store._store.put(Put(schema.app_config_key(ORG, app), settings))


@asynccontextmanager
async def open_profile_harness(folder: Path, **config: Any) -> AsyncIterator[ProfileHarness]:
    clock, stores = ShiftedClock(), []
    labels = config.setdefault("labels", Config.development().labels)

    def wrapped(store: Any) -> Any:
        stores.append(CountingStore(store))
        return stores[0]

    tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
    async with data_port(folder, wrapped, clock, **config) as port, Tasks(clock) as tasks:
        store: Any = stores[0]
        revocation, environ = RevocationList(store, clock, tasks), {"PRICE_KEEPER_API_KEY": ADMIN_KEY}
        full_config = Config(labels=labels)
        clients = ClientVerifier(store, clock.now)
        parts = build_control_services(
            full_config, environ, store, clock, port.budget_registry, tokens, revocation, clients, UnlimitedRates()
        )
        control = ControlDispatcher(api.build_routes(Readiness(clock), MetricsRegistry()), clock.now)
        control.start(parts)
        async with (
            open_control_port(control, Address("127.0.0.1", 0), clock) as address,
            aiohttp.ClientSession() as session,
        ):
            yield ProfileHarness(port, store, clock, tokens, session, f"http://{address}")
