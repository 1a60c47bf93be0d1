"""`price-keeper dev`: run everything on this machine, with an embedded store, a simulated Bedrock and a demo org.

Secrets are generated on the first start and kept in the data directory, readable by its owner alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from price_keeper import app
from price_keeper.auth.client_secrets import hash_secret, make_secret
from price_keeper.auth.registration import build_secret_attributes
from price_keeper.cli.atomic_file import open_atomically
from price_keeper.cli.serve_command import disable_core_dumps, run_until_stopped
from price_keeper.cli.shared_arguments import ADMIN_KEY_VARIABLE, API_URL_VARIABLE
from price_keeper.cli.store_selection import load_config_at
from price_keeper.clock import SystemClock
from price_keeper.config import Address, Config, LabelConfig
from price_keeper.config.config_changes import apply_reloadable
from price_keeper.config.config_sections import KeyConfig, TlsConfig
from price_keeper.domain import Scope, build_client_id
from price_keeper.errors import PriceKeeperError
from price_keeper.server.server_limits import release_large_blocks
from price_keeper.server.tls import ensure_local_certificates
from price_keeper.stores import schema
from price_keeper.stores.contract import ItemMissing, Put, Store, Update, Value
from price_keeper.telemetry import logs

DEMO_ORG = "d0000000-0000-4000-8000-000000000001"
DEMO_APP = "demo"
ADMIN_KEY_FILE = "admin-key"  # in the data directory
# curl, botocore and Node each read the trusted authorities from a different variable.
_CA_BUNDLE_VARIABLES = ("CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
DEMO_TOKEN_SECONDS = 24 * 3600  # a day of work without a new token

# In micro-USD: some hundreds of calls for each label, so that a user reaches a quota and sees the fallback.
_FIRST_QUOTA, _OTHER_QUOTA = 1_000_000, 500_000

_GUIDE = """\
Bedrock Price Keeper is ready; Bedrock is simulated.
  data port     {data}
  control port  {control}  (health and readiness: {control}/ready)
  status page   {control}/status  (sign in with the admin key)
  admin key     in {admin_key}, for the control API: {control}/openapi.json

Paste into another shell:

unset AWS_BEARER_TOKEN_BEDROCK
export {api}={control} {key}="$(cat {key_file})"
export AWS_ENDPOINT_URL_BEDROCK_RUNTIME={data} AWS_REGION=us-east-1 AWS_DEFAULT_REGION=us-east-1
export AWS_ACCESS_KEY_ID=any AWS_SECRET_ACCESS_KEY=any
export AWS_SESSION_TOKEN={token}{trust}

The token lasts a day. Ask with any AWS SDK as it is, for example with Python's:

{python} -c 'import boto3; print(boto3.client("bedrock-runtime").converse(modelId="{label}",
  messages=[dict(role="user", content=[dict(text="Hello")])])["output"])'

A second or two later, see what that cost, and how much may be spent in a day:

{price_keeper} spend --data-dir {folder}
{price_keeper} org show {org}
"""

# Not with --tls: for these requests botocore trusts public authorities only.
_RENEWAL_GUIDE = """
For credentials that renew themselves, paste these as well:

unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN
export AWS_CONTAINER_CREDENTIALS_FULL_URI={data}/credentials
export AWS_CONTAINER_AUTHORIZATION_TOKEN='{client_id}:{secret}'
"""


def run_dev(args: Namespace) -> int:
    folder: Path = args.data_dir
    disable_core_dumps()
    release_large_blocks()
    _read_or_create(folder / "token-key", lambda: secrets.token_urlsafe(48))
    _read_or_create(folder / ADMIN_KEY_FILE, lambda: secrets.token_urlsafe(32))
    secret = _read_or_create(folder / "demo-secret", make_secret)
    authority, tls = _create_tls(folder) if args.tls else (None, None)
    read_config = partial(build_dev_config, folder, args.port, args.control_port, tls, args.config)
    config = read_config()

    async def on_started(started: app.StartedServer) -> None:
        labels = list(config.labels)
        await _create_demo_client(started.store, secret, labels)
        token = started.token_service.mint_access(DEMO_ORG, DEMO_APP, DEMO_TOKEN_SECONDS).token
        environment = _DevEnvironment(started, secret, authority, folder, token, labels[0])
        print(json.dumps(environment.to_record()) if args.json else environment.format_guide(), flush=True)

    logs.configure_logging("text")
    run_until_stopped(config, os.environ, on_started, reload_config=read_config if args.config else None)
    return 0


def _create_tls(folder: Path) -> tuple[Path, TlsConfig]:
    authority, certificate, key = ensure_local_certificates((folder / "tls").absolute(), SystemClock().now())
    return authority, TlsConfig(str(certificate), str(key))


def build_dev_config(
    folder: Path, data_port: int, control_port: int, tls: TlsConfig | None, labels_file: Path | None = None
) -> Config:
    """The configuration of a demo: with the labels and prices of a file if one is given, all of whose calls go to the
    simulated Bedrock. Raises ConfigError."""
    config = Config.development()
    if labels_file is not None:
        config = apply_reloadable(config, load_config_at(labels_file))
        labels = {name: _remove_addresses(label) for name, label in config.labels.items()}
        config = dataclasses.replace(config, labels=labels)
    return dataclasses.replace(
        config,
        listen=dataclasses.replace(
            config.listen,
            data=Address("127.0.0.1", data_port),
            control=Address("127.0.0.1", control_port),
            tls=tls,
        ),
        store=dataclasses.replace(config.store, path=str(folder / "price-keeper.db")),
        # A short flush interval: the cost of a call shows at once, and saving writes does not matter here.
        journal=dataclasses.replace(config.journal, dir=str(folder / "journal"), flush_interval_max_secs=1),
        auth=dataclasses.replace(
            config.auth,
            keys=(KeyConfig("dev", "HS256", secret_file=str(folder / "token-key")),),
            admin_api_key_file=str(folder / ADMIN_KEY_FILE),
        ),
    )


def _remove_addresses(label: LabelConfig) -> LabelConfig:
    endpoints = tuple(dataclasses.replace(endpoint, endpoint=None) for endpoint in label.endpoints)
    return dataclasses.replace(label, endpoints=endpoints)


@dataclasses.dataclass(frozen=True, slots=True)
class _DevEnvironment:
    """Addresses and credentials of the running demo, formatted as a guide or as JSON."""

    services: app.StartedServer
    secret: str
    authority: Path | None
    folder: Path
    token: str
    label: str  # of the first call that the guide shows

    @property
    def data_url(self) -> str:
        return f"{'https' if self.authority else 'http'}://{self.services.data_address}"

    @property
    def control_url(self) -> str:
        return f"http://{self.services.control_address}"

    def format_guide(self) -> str:
        authority = shlex.quote(str(self.authority))
        trust = "\nexport " + " ".join(f"{name}={authority}" for name in _CA_BUNDLE_VARIABLES) if self.authority else ""
        return (_GUIDE if self.authority else _GUIDE + _RENEWAL_GUIDE).format(
            trust=trust,
            python=shlex.quote(sys.executable),
            price_keeper=_format_program_name(),
            folder=shlex.quote(str(self.folder.absolute())),
            admin_key=self.folder.absolute() / ADMIN_KEY_FILE,
            api=API_URL_VARIABLE,
            key=ADMIN_KEY_VARIABLE,
            key_file=shlex.quote(str((self.folder / ADMIN_KEY_FILE).absolute())),
            org=DEMO_ORG,
            label=self.label,
            data=self.data_url,
            control=self.control_url,
            token=self.token,
            client_id=build_client_id(DEMO_ORG, DEMO_APP),
            secret=self.secret,
        )

    def to_record(self) -> dict[str, Any]:
        """`environment` holds the variables that the guide exports, except the admin key, which stays in its file."""
        call_variables = {
            "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": self.data_url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_SESSION_TOKEN": self.token,
        }
        trust = {name: str(self.authority) for name in _CA_BUNDLE_VARIABLES} if self.authority else {}
        return {
            "data": self.data_url,
            "control": self.control_url,
            "admin_key_file": str((self.folder / ADMIN_KEY_FILE).absolute()),
            "environment": {API_URL_VARIABLE: self.control_url, **call_variables, **trust},
            "client_id": build_client_id(DEMO_ORG, DEMO_APP),
            "client_secret": self.secret,
        }


def _format_program_name() -> str:
    """A command that starts this program from any directory, even if it is not on the PATH."""
    script = Path(sys.executable).with_name("price-keeper")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m price_keeper.cli"


async def _create_demo_client(store: Store, secret: str, labels: list[str]) -> None:
    """Create the demo org and its app on the first start, with these labels as the org's chain."""
    key = schema.app_config_key(DEMO_ORG, DEMO_APP)
    if await store.get(key, consistent=True) is None:
        hashed = (await asyncio.to_thread(hash_secret, secret)).decode()
        org_settings: dict[str, Value] = {
            "org_name": "demo",
            "timezone": "UTC",
            "model_ordering": list(labels),
            "quotas": {label: _OTHER_QUOTA if number else _FIRST_QUOTA for number, label in enumerate(labels)},
        }
        client_credentials = build_secret_attributes(Scope(DEMO_ORG, DEMO_APP), hashed, SystemClock().now())
        await store.transact(
            [
                Put(key, {"app_name": "demo", **client_credentials}, ItemMissing()),
                Update(schema.org_config_key(DEMO_ORG), set_if_missing=org_settings),
                Update(schema.org_entry_key(DEMO_ORG), set_if_missing={"org_name": "demo"}),
            ]
        )


def _read_or_create(path: Path, make: Callable[[], str]) -> str:
    """The content of a file that the first start creates, readable by its owner alone; later starts only read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            with suppress(FileExistsError), open_atomically(path, 0o600) as file:
                file.write(make())  # if two processes create it at once, the first file stays
        return path.read_text().strip()
    except OSError as failure:
        raise PriceKeeperError(
            f"cannot keep {path}: {failure.strerror}; name a folder that can be written to with --data-dir DIR"
        ) from None
