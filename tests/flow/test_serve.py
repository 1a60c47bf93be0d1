"""What `price-keeper serve` says at its start: where it listens, and what it cannot work with."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
from price_keeper.server.tls import ensure_local_certificates

from tests.support.commands import ROOT, SECONDS, price_keeper, sidecar
from tests.support.compiled import IS_COMPILED

SERVED = {
    "PRICE_KEEPER_JWT_SECRET": "a secret of the test's own, long enough",
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
}
# Packages and modules that most starts do not need: each takes time and memory of every sidecar.
LOADED_WHEN_NEEDED = {
    "aioboto3",
    "aiobotocore",
    "bedrock_simulator",
    "boto3",
    "botocore",
    "h2",
    "hpack",
    "multiprocessing",
    "opentelemetry",
    "price_keeper.cli.dev_command",
    "price_keeper.doctor",
    "price_keeper.reports.focus_export",
    "price_keeper.server.http2",
    "price_keeper.stores.dynamodb",
    "price_keeper.telemetry.tracing",
    "setuptools",
    "shtab",
    "unittest",
}
SIMULATED = SERVED | {"PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    return tmp_path


def test_default_start_loads_only_what_it_needs(folder: Path) -> None:
    """SQLite, AWS credentials in the environment, prices from AWS's list: until the first response over HTTP/1.1."""
    environment = {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "an-example",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        "HTTPS_PROXY": "http://127.0.0.1:9",  # a closed port, so no request reaches AWS
        "PYTHONPROFILEIMPORTTIME": "1",  # makes Python list what it imports
    }
    with sidecar("serve", folder=folder, **SERVED, **environment) as running:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{running.data}/inference-profiles", timeout=SECONDS)
        assert running.stop() == 0
        loaded = set(re.findall(r"^import time: .*\| +(\S+)$", running.errors, re.MULTILINE))
    assert {"price_keeper.handler", "price_keeper.usage.price_list_client"} <= loaded
    assert loaded & LOADED_WHEN_NEEDED == set()


def test_serve_prints_its_build_first(folder: Path) -> None:
    with sidecar("serve", folder=folder, **SIMULATED) as running:
        build = "compiled" if IS_COMPILED else "pure Python"
        assert running.startup_output.startswith(f"Bedrock Price Keeper {version('bedrock-price-keeper')}, {build}\n")


_LOADED = """
import gc
from price_keeper.cli import entry_point

collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
entry_point.load_command("serve_command.run_serve")
print(len(collections), gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_command_modules_are_imported_without_garbage_collections() -> None:
    loaded = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.split() == ["0", "True", "True"]


_AUTHORITIES = """
import ssl
from price_keeper.cli import entry_point

entry_point.load_command("serve_command.run_serve")
from aiohttp import connector

for context in connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED, ssl.create_default_context():
    print(context.cert_store_stats()["x509_ca"])
"""


def test_serve_modules_are_imported_without_reading_authorities(tmp_path: Path) -> None:
    authority, _, _ = ensure_local_certificates(tmp_path, time.time())
    variables = os.environ | {"SSL_CERT_FILE": str(authority)}
    command = [sys.executable, "-c", _AUTHORITIES]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=variables)
    assert loaded.stdout.split() == ["0", "0", "1"]


def test_tls_address_is_shown_as_https(folder: Path) -> None:
    authority, certificate, key = ensure_local_certificates(folder / "tls", time.time())
    tls = f"{{certificate_file: {certificate}, key_file: {key}}}"
    with sidecar("serve", folder=folder, PRICE_KEEPER__LISTEN__TLS=tls, **SIMULATED) as running:
        assert running.data.startswith("https://")
        context = ssl.create_default_context(cafile=str(authority))
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{running.data}/inference-profiles", timeout=SECONDS, context=context)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "sesame\nopen"}, "the AWS credentials cannot be used: "),
        ({"AWS_SESSION_TOKEN": "sesame open"}, "the AWS credentials cannot be used: "),
        (
            {"PRICE_KEEPER__UPSTREAM__AUTH": "bearer", "AWS_BEARER_TOKEN_BEDROCK": "sesame\r\nopen"},
            "the key for Bedrock, a bearer token, is printable ASCII without spaces",
        ),
    ],
)
def test_unusable_secret_is_reported_in_one_line(folder: Path, environment: dict[str, str], words: str) -> None:
    refused = price_keeper("serve", folder=folder, **SERVED, **environment)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert "sesame" not in refused.stderr + refused.stdout
