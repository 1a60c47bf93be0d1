"""What `price-keeper serve` says at its start: where it listens, and what it cannot work with."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from price_keeper.server.tls import ensure_local_certificates

from tests.support.commands import ROOT, SECONDS, price_keeper, sidecar

SERVED = {
    "PRICE_KEEPER_JWT_SECRET": "a secret of the test's own, long enough",
    "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
    "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
}
SIMULATED = SERVED | {"PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    return tmp_path


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
