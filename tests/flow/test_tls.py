"""TLS on the data port: a real handshake, a real SDK, and clear words for what cannot be used."""

from __future__ import annotations

import json
import os
import socket
import ssl
import stat
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.exceptions import SSLError

from proxy.errors import ConfigError
from proxy.surface.tls import local_authority, server_context
from tests.support.commands import Sidecar, sidecar

QUESTION = [{"role": "user", "content": [{"text": "Hello"}]}]
NOW = 1_800_000_000.0
DAY = 86_400


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("tls")
    with sidecar("dev", "--tls", "--port", "0", "--control-port", "0", folder=folder) as started:
        yield started


def test_an_sdk_asks_over_tls_as_pasted(running: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in running.exports.items():
        if not name.startswith("AWS_CONTAINER"):
            monkeypatch.setenv(name, value)
    answer = boto3.session.Session().client("bedrock-runtime").converse(modelId="premium", messages=QUESTION)
    assert answer["output"]["message"]["content"][0]["text"]
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(SSLError):
        boto3.session.Session().client("bedrock-runtime").converse(modelId="premium", messages=QUESTION)


def test_an_api_key_goes_as_bearer(running: Sidecar) -> None:
    context = ssl.create_default_context(cafile=running.exports["CURL_CA_BUNDLE"])
    body = json.dumps({"model": "premium", "messages": [{"role": "user", "content": "Hello"}]}).encode()
    request = urllib.request.Request(
        f"{running.data}/openai/v1/chat/completions",
        body,
        {"authorization": f"Bearer {running.exports['AWS_SESSION_TOKEN']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request, context=context) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
def test_both_protocols_are_offered(running: Sidecar, protocol: str) -> None:
    place = urlsplit(running.data)
    context = ssl.create_default_context(cafile=running.exports["CURL_CA_BUNDLE"])
    context.set_alpn_protocols([protocol])
    with (
        socket.create_connection((place.hostname or "", place.port or 0)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.selected_alpn_protocol() == protocol


def test_the_local_authority_stays_until_it_is_about_to_expire(tmp_path: Path) -> None:
    files = local_authority(tmp_path / "tls", NOW)
    first = [file.read_bytes() for file in files]
    assert [stat.S_IMODE(os.stat(file).st_mode) for file in files] == [0o600] * 3
    local_authority(tmp_path / "tls", NOW + 300 * DAY)
    assert [file.read_bytes() for file in files] == first
    local_authority(tmp_path / "tls", NOW + 340 * DAY)
    assert all(file.read_bytes() != before for file, before in zip(files, first, strict=True))
    server_context(files[1], files[2])


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    _, certificate, key = local_authority(tmp_path / "good", NOW)
    _, _, other_key = local_authority(tmp_path / "other", NOW)
    (tmp_path / "text").write_text("no certificate")
    for bad in (
        (tmp_path / "gone", key),
        (certificate, tmp_path / "text"),
        (tmp_path / "text", key),
        (certificate, other_key),
    ):
        with pytest.raises(ConfigError, match=r"listen\.tls"):
            server_context(*bad)
