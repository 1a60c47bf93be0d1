"""A sidecar that serves, before simulated Bedrocks in processes of their own: one that is well, others in trouble."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.auth.client_secrets import hash_secret, make_secret
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.config.config_sections import UnitPrices
from price_keeper.domain import build_client_id
from price_keeper.server.tls import ensure_local_certificates
from price_keeper.stores import schema
from price_keeper.stores.contract import ItemMissing, Put
from price_keeper.stores.sqlite import SqliteStore

from tests.support.clients import API_KEY, BEARER, CONTAINER, SESSION, Client
from tests.support.commands import Sidecar, sidecar
from tests.support.simulated import CLAUDE, BedrockProcess, bedrock_process

ORG = "c0000000-0000-4000-8000-000000000001"
APP = "clients"
SIGNING_SECRET = "what the sidecar of these tests signs its tokens with"
CALLERS_KEY = "CALLERSOWNACCESSKEY0"
CALLERS_SECRET = "the-callers-own-secret-key"

OLDER_CLAUDE = "anthropic.claude-3-5-sonnet-20241022-v2:0"  # an alias, for which there is no label
PROFILE = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-opus-4-1-20250805-v1:0"

# Labels whose Bedrock fails: no listener, or this is what it does to every request.
CLOSED, THROTTLED, SPENT, CUT, BROKEN, SLOW = "closed", "throttled", "spent", "cut", "broken", "slow"
SLOW_SECONDS = 1.6
_FAULTS: dict[str, dict[str, Any]] = {
    THROTTLED: {"fault": "throttle"},
    SPENT: {"fault": "quota"},
    CUT: {"fault": "cut", "after_bytes": 60},
    BROKEN: {"fault": "cut", "after_frames": 3},
    SLOW: {"latency_ms": int(SLOW_SECONDS * 1000)},
}
_POLICIES = [field.name for field in dataclasses.fields(UnitPrices)]
_PRICES = {"input": 3, "output": 15, "cache_read": 0.3, "cache_write_5m": 3.75, "cache_write_1h": 6}


# One more way to say who calls: to the same sidecar as it serves over https.
BEARER_OVER_HTTPS = "bearer over https"


@dataclass(frozen=True)
class ClientStage:
    plain: Sidecar
    encrypted: Sidecar
    authority: Path  # whose certificate vouches for the encrypted one
    bedrock: BedrockProcess  # the one that is well
    faulty_bedrocks: dict[str, BedrockProcess]  # by their labels
    tokens: TokenService
    secret: str

    @property
    def all_sidecars(self) -> list[BedrockProcess]:
        return [self.bedrock, *self.faulty_bedrocks.values()]

    @property
    def url(self) -> str:
        return self.plain.data

    @property
    def output(self) -> str:
        """All that the sidecars said."""
        sidecars = (self.plain, self.encrypted)
        return "".join(each.errors_file.with_suffix(".out").read_text() + each.errors for each in sidecars)

    def token(self, seconds: int = 3600) -> str:
        return self.tokens.mint_access(ORG, APP, seconds).token

    def environ(
        self, client: Client, auth_method: str, url: str | None = None, token: str | None = None
    ) -> dict[str, str]:
        """All that a user sets: where the sidecar is, and who calls."""
        if auth_method == BEARER_OVER_HTTPS:
            trust = dict.fromkeys(("AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"), str(self.authority))
            return self.environ(client, BEARER, self.encrypted.data, token) | trust
        url = url or self.url
        return {client.redirect: url + client.path, **self._auth_environment(auth_method, url, token or self.token())}

    def _auth_environment(self, auth_method: str, url: str, token: str) -> dict[str, str]:
        if auth_method == SESSION:
            keys = {"AWS_ACCESS_KEY_ID": CALLERS_KEY, "AWS_SECRET_ACCESS_KEY": CALLERS_SECRET}
            return keys | {"AWS_SESSION_TOKEN": token}
        if auth_method == CONTAINER:
            pair = f"{build_client_id(ORG, APP)}:{self.secret}"
            fetched_at = f"{url}/credentials"
            return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": fetched_at, "AWS_CONTAINER_AUTHORIZATION_TOKEN": pair}
        return {{BEARER: "AWS_BEARER_TOKEN_BEDROCK", API_KEY: "OPENAI_API_KEY"}[auth_method]: token}


@contextmanager
def stage(folder: Path) -> Iterator[ClientStage]:
    secret = make_secret()
    with ExitStack() as running:
        bedrock = running.enter_context(bedrock_process())
        places = {CLOSED: running.enter_context(_closed_port())}
        troubled = {name: running.enter_context(bedrock_process()) for name in _FAULTS}
        for name, place in troubled.items():
            place.plan(always=_FAULTS[name])
            places[name] = place.url
        config = _config(bedrock.url, places)
        authority, certificate, key = ensure_local_certificates(folder / "tls", time.time())
        tls = {"certificate_file": str(certificate), "key_file": str(key)}
        yield ClientStage(
            running.enter_context(_serving(folder / "plain", config, secret)),
            running.enter_context(_serving(folder / "encrypted", config, secret, tls=tls)),
            authority,
            bedrock,
            troubled,
            TokenService([SigningKey("k1", "HS256", SIGNING_SECRET, SIGNING_SECRET)], "price-keeper", time.time),
            secret,
        )


@contextmanager
def _serving(folder: Path, config: dict[str, Any], secret: str, **listen: Any) -> Iterator[Sidecar]:
    folder.mkdir()
    asyncio.run(_make_client(folder / "price-keeper.db", secret))
    config = config | {"listen": config["listen"] | listen}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with sidecar("serve", folder=folder, **_environment()) as running:
        yield running


def _environment() -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key, "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key}
    return keys | {"PRICE_KEEPER_JWT_SECRET": SIGNING_SECRET}


def _config(url: str, places: dict[str, str]) -> dict[str, Any]:
    troubled = {
        name: _label(f"anthropic.claude-{name}-v1:0", endpoints=[{"region": "us-east-1", "endpoint": place}])
        for name, place in places.items()
    }
    return {
        "listen": {"data": "127.0.0.1:0", "control": "127.0.0.1:0"},
        "upstream": {"endpoint": url},
        "store": {"path": "price-keeper.db"},
        "journal": {"dir": "journal"},
        "unknown_org": "meter",
        "guardrails": {"prices_usd_per_1000_units": dict.fromkeys(_POLICIES, 0.15)},
        "labels": {
            "premium": _label(CLAUDE, aliases=[OLDER_CLAUDE]),
            "economy": _label("amazon.nova-lite-v1:0", "nova"),
            "profile": _label(PROFILE),
            "film": _label("amazon.nova-reel-v1:0", "nova", price_usd_per_async_job=1.5),
            **troubled,
        },
    }


def _label(model: str, family: str = "anthropic", **more: Any) -> dict[str, Any]:
    return {"model": model, "format": family, "prices_usd_per_1m": _PRICES, **more}


@contextmanager
def _closed_port() -> Iterator[str]:
    """No server listens there, and none can while it is held."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


async def _make_client(file: Path, secret: str) -> None:
    store = await SqliteStore(file, time.time).open()
    try:
        item = {"app_name": APP, "client_secret_hash": hash_secret(secret).decode()}
        await store.put(Put(schema.app_config_key(ORG, APP), item, ItemMissing()))
    finally:
        await store.close()


def new_marker() -> str:
    """A word that is nowhere else."""
    return f"marker{uuid4().hex}"
