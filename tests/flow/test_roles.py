"""A control service and sidecars as processes of their own: what each role serves, and that sidecars cannot mint."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from price_keeper.auth.client_secrets import make_secret

from tests.support.commands import ROOT, SECONDS, Sidecar, price_keeper, sidecar

ORG = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
SHOP, BOT = f"org-{ORG}-app-shop", f"org-{ORG}-app-bot"
ADMIN_KEY = "the-admin-key-of-these-tests-long-enough"
FREE = {
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SETTINGS = {
    "org_name": "Acme",
    "timezone": "UTC",
    "quota_scope": "APP",
    "model_ordering": ["premium", "economy"],
    "quotas": {"premium": 10_000_000, "economy": 2_000_000},
}
_LABELS = ROOT.joinpath("config.yaml").read_text().partition("\nlabels:\n")[2]


def config(place: Path, folder: str, source: str, more: str = "") -> Path:
    """A folder with a configuration whose one key comes from `source`, on the store of all."""
    own = place / folder
    own.mkdir()
    keys = f"[{{kid: k1, alg: EdDSA, {source}}}]"
    auth = f"auth:\n  keys: {keys}\n{more}"
    (own / "config.yaml").write_text(f"store: {{path: {place / 'store.db'}}}\n{auth}\nlabels:\n{_LABELS}")
    return own


def get(url: str, **headers: str) -> tuple[int, Any, Any]:
    return ask("GET", url, None, **headers)


def ask(method: str, url: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    shown = {name.replace("_", "-"): value for name, value in headers.items()} | {"Content-Type": "application/json"}
    given = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, given, shown, method=method)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.status, answer.headers, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers, json.loads(refused.read() or b"null")


@dataclass
class Fleet:
    """A control service, started without anything of AWS, and two clients that are registered there."""

    place: Path
    control: Sidecar
    secrets: dict[str, str]

    @contextmanager
    def sidecar(self, name: str, more: str | None = None) -> Iterator[Sidecar]:
        """With the public key alone."""
        source = f"public_key_file: {self.place / 'keys/k1.pub.pem'}"
        url = f"  control_url: {self.control.control}\n" if more is None else more
        folder = config(self.place, name, source, url)
        simulated = FREE | {"PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}
        with sidecar("serve", "--role", "sidecar", folder=folder, **simulated) as running:
            yield running
        output = running.errors + running.startup_output
        assert "Traceback" not in output
        assert not any(secret in output for secret in self.secrets.values())
        assert not re.search(r"eyJ[\w-]+\.", output)
        shutil.rmtree(folder)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    price_keeper("keys", "new", "--kid", "k1", "--out", "keys", folder=tmp_path)
    folder = config(tmp_path, "control", f"private_key_file: {tmp_path / 'keys/k1.pem'}")
    with sidecar("serve", "--role", "control", folder=folder, PRICE_KEEPER_API_KEY=ADMIN_KEY, **FREE) as control:
        api = f"{control.control}/api/v1/orgs/{ORG}"
        assert ask("PUT", api, SETTINGS, X_API_Key=ADMIN_KEY)[0] == 201
        secrets = {}
        for app in ("shop", "bot"):
            body = ask("PUT", f"{api}/apps/{app}", {"app_name": app}, X_API_Key=ADMIN_KEY)[2]
            token = body["secret_retrieval_token"]
            secret = get(f"{api}/apps/{app}/credentials/secret", X_Retrieval_Token=token)[2]
            secrets[secret["client_id"]] = secret["client_secret"]
        yield Fleet(tmp_path, control, secrets)
        assert "Traceback" not in control.errors


def test_control_service_has_no_data_port_and_needs_no_aws_credentials(fleet: Fleet) -> None:
    control = fleet.control
    assert "listens on" not in control.startup_output
    assert get(f"{control.control}/ready")[0] == 200
    assert get(f"{control.control}/openapi.json")[0] == 200
    status, _, body = get(f"{control.control}/api/v1/orgs/{ORG}/apps/shop/model-selection", X_API_Key=ADMIN_KEY)
    assert (status, body["active_label"]) == (200, "premium")
    status, headers, body = get(f"{control.control}/credentials", Authorization=f"{SHOP}:{fleet.secrets[SHOP]}")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert body.keys() == {"AccessKeyId", "SecretAccessKey", "Token", "Expiration"}
    assert get(f"{control.control}/credentials", Authorization=f"{SHOP}:{make_secret()}")[0] == 401
    assert control.stop() == 0


def test_control_service_listens_on_one_port(fleet: Fleet) -> None:
    sockets = (
        subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=False) if shutil.which("ss") else None
    )
    if sockets is None or sockets.returncode:
        pytest.skip("this machine cannot tell which ports are open")
    own = [line for line in sockets.stdout.splitlines() if f"pid={fleet.control.process.pid}," in line]
    assert len(own) == 1


def test_sidecar_serves_only_probes_beside_data_port(fleet: Fleet) -> None:
    with fleet.sidecar("alone") as running:
        assert get(f"{running.control}/ready")[0] == 200
        assert get(f"{running.control}/health")[0] == 200
        for path in ("/openapi.json", "/credentials", "/.well-known/jwks.json", f"/api/v1/orgs/{ORG}"):
            assert get(f"{running.control}{path}", X_API_Key=ADMIN_KEY)[0] == 404
        assert ask("POST", f"{running.control}/auth/token", {})[0] == 404
        assert running.stop() == 0


def test_boto3_works_through_sidecar_with_tokens_of_control_service(fleet: Fleet) -> None:
    with fleet.sidecar("calls") as running:
        called = _boto3(running, f"{SHOP}:{fleet.secrets[SHOP]}")
        assert (called.returncode, called.stdout) == (0, "200\n200\n"), called.stderr
        strange = _boto3(running, f"{SHOP}:{make_secret()}")
        assert strange.returncode != 0
        assert "the client id or its secret is wrong" in strange.stderr


_CALLS = """
import boto3
client = boto3.client("bedrock-runtime", region_name="us-east-1")
for _ in range(2):
    told = client.converse(modelId="premium", messages=[{"role": "user", "content": [{"text": "Hello"}]}])
    print(told["ResponseMetadata"]["HTTPStatusCode"])
"""


def _boto3(running: Sidecar, authorization: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {
        "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": running.data,
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{running.data}/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": authorization,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    program = [sys.executable, "-c", _CALLS]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_cached_credentials_are_issued_without_control_service(fleet: Fleet) -> None:
    with fleet.sidecar("away") as running:
        url, shop = f"{running.data}/credentials", f"{SHOP}:{fleet.secrets[SHOP]}"
        first = get(url, Authorization=shop)
        assert first[0] == 200
        fleet.control.stop(signal.SIGKILL)
        assert get(url, Authorization=shop)[2] == first[2]
        began = time.monotonic()
        status, headers, body = get(url, Authorization=f"{BOT}:{fleet.secrets[BOT]}")
        assert (status, headers["Retry-After"], headers["x-amzn-errortype"]) == (
            503,
            "2",
            "ServiceUnavailableException",
        )
        assert "the control service" in body["message"]
        assert get(url, Authorization=f"{SHOP}:{make_secret()}")[0] == 503
        assert time.monotonic() - began < 10
        assert _boto3(running, shop).returncode == 0
        assert running.errors.count("cannot fetch credentials from the control service") == 1


def test_sidecar_without_control_url_says_so(fleet: Fleet) -> None:
    with fleet.sidecar("untold", "") as running:
        status, _, document = get(f"{running.data}/credentials", Authorization=f"{SHOP}:{fleet.secrets[SHOP]}")
        assert status == 403
        assert "auth.control_url" in document["message"]
        given = {"client_id": SHOP, "client_secret": fleet.secrets[SHOP]}
        issued = ask("POST", f"{fleet.control.control}/auth/token", given)[2]
        shown = {"Authorization": f"Bearer {issued['access_token']}"}
        body = {"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}
        assert ask("POST", f"{running.data}/model/premium/converse", body, **shown)[0] == 200


def test_control_service_needs_signing_key(tmp_path: Path) -> None:
    price_keeper("keys", "new", "--kid", "k1", "--out", "keys", folder=tmp_path)
    folder = config(tmp_path, "control", f"public_key_file: {tmp_path / 'keys/k1.pub.pem'}")
    refused = price_keeper("serve", "--role", "control", folder=folder, **FREE)
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "auth.keys.0: a control service signs tokens with this key, and its private half is not configured\n"
    )


BOUND = f"mode: identity, identity: {{org: {ORG}, app: shop}}"
IDENTITY = f"""
store: {{path: store.db}}
listen: {{data: 127.0.0.1:0, control: 127.0.0.1:0}}
upstream: {{endpoint: simulated}}
unknown_org: meter
auth: {{{BOUND}}}
labels:
"""


@pytest.mark.parametrize("role", ["sidecar", "both"])
def test_identity_without_signing_key_serves_calls(tmp_path: Path, role: str) -> None:
    (tmp_path / "config.yaml").write_text(IDENTITY + _LABELS)
    body = {"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}
    without = {"PRICE_KEEPER_JWT_SECRET": "", "PRICE_KEEPER_API_KEY": ADMIN_KEY}
    with sidecar("serve", "--role", role, folder=tmp_path, **without) as running:
        assert ask("POST", f"{running.data}/model/premium/converse", body)[0] == 200
        if role == "both":
            assert get(f"{running.control}/.well-known/jwks.json")[2] == {"keys": []}
            login = {"client_id": SHOP, "client_secret": make_secret()}
            status, _, refused = ask("POST", f"{running.control}/auth/token", login)
            assert (status, "auth.keys has no private key" in str(refused)) == (503, True), refused
            unsigned = "eyJhbGciOiJub25lIiwia2lkIjoiazEifQ.e30."
            assert get(f"{running.control}/api/v1/orgs/{ORG}", Authorization=f"Bearer {unsigned}")[0] == 401
        assert running.stop() == 0
        assert "Traceback" not in running.errors


@pytest.mark.parametrize(
    ("auth", "role"),
    [
        (f"{BOUND}, keys: [{{kid: a, alg: HS256, secret_env: GONE}}]", "both"),
        (BOUND, "control"),
        ("mode: required", "sidecar"),
    ],
)
def test_missing_key_that_is_needed_or_configured_is_refused(tmp_path: Path, auth: str, role: str) -> None:
    (tmp_path / "config.yaml").write_text(f"store: {{path: store.db}}\nauth: {{{auth}}}\nlabels:\n{_LABELS}")
    refused = price_keeper("serve", "--role", role, folder=tmp_path, PRICE_KEEPER_JWT_SECRET="", **FREE)
    assert (refused.returncode, refused.stderr.startswith("auth.keys.0")) == (2, True), refused.stderr
