"""TLS on the data port: a real handshake, a real SDK, and clear words for what cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import stat
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.exceptions import SSLError
from price_keeper.errors import ConfigError
from price_keeper.server.tls import create_server_context, ensure_local_certificates

from tests.support.commands import Sidecar, sidecar
from tests.support.port_harness import PortHarness, echo, on_both_loops, open_port
from tests.support.raw_clients import ask, descriptors, eventually, wait_quietly

QUESTION = [{"role": "user", "content": [{"text": "Hello"}]}]
NOW = 1_800_000_000.0
DAY = 86_400


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("tls")
    with sidecar("dev", "--tls", "--port", "0", "--control-port", "0", folder=folder) as started:
        yield started


def test_sdk_works_over_tls_with_pasted_environment(running: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in running.exports.items():
        if not name.startswith("AWS_CONTAINER"):
            monkeypatch.setenv(name, value)
    answer = boto3.session.Session().client("bedrock-runtime").converse(modelId="premium", messages=QUESTION)
    assert answer["output"]["message"]["content"][0]["text"]
    monkeypatch.delenv("AWS_CA_BUNDLE")
    with pytest.raises(SSLError):
        boto3.session.Session().client("bedrock-runtime").converse(modelId="premium", messages=QUESTION)


def test_api_key_is_accepted_as_bearer(running: Sidecar) -> None:
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


def test_local_authority_is_kept_until_it_expires(tmp_path: Path) -> None:
    files = ensure_local_certificates(tmp_path / "tls", NOW)
    first = [file.read_bytes() for file in files]
    assert [stat.S_IMODE(os.stat(file).st_mode) for file in files] == [0o600] * 3
    ensure_local_certificates(tmp_path / "tls", NOW + 300 * DAY)
    assert [file.read_bytes() for file in files] == first
    ensure_local_certificates(tmp_path / "tls", NOW + 340 * DAY)
    assert all(file.read_bytes() != before for file, before in zip(files, first, strict=True))
    create_server_context(files[1], files[2])


def test_unusable_tls_files_are_named(tmp_path: Path) -> None:
    _, certificate, key = ensure_local_certificates(tmp_path / "good", NOW)
    _, _, other_key = ensure_local_certificates(tmp_path / "other", NOW)
    (tmp_path / "text").write_text("no certificate")
    for bad in (
        (tmp_path / "gone", key),
        (certificate, tmp_path / "text"),
        (tmp_path / "text", key),
        (certificate, other_key),
    ):
        with pytest.raises(ConfigError, match=r"listen\.tls"):
            create_server_context(*bad)


# Handshakes.


@asynccontextmanager
async def over_tls(folder: Path, **limits: float) -> AsyncIterator[tuple[PortHarness, ssl.SSLContext]]:
    """A port, and what its clients trust."""
    authority, certificate, key = ensure_local_certificates(folder / "tls", time.time())
    trust = ssl.create_default_context(cafile=str(authority))
    async with open_port(echo, tls=create_server_context(certificate, key), **limits) as rig:
        yield rig, trust


async def is_served(rig: PortHarness, trust: ssl.SSLContext) -> None:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("localhost", rig.port, ssl=trust)
        writer.write(ask(b"x", b"connection: close\r\n"))
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")


@on_both_loops
async def test_connections_count_from_before_handshake(tmp_path: Path) -> None:
    before = descriptors()
    async with over_tls(tmp_path, connections=4, surplus_connections=1, head_seconds=20) as (rig, trust):
        await is_served(rig, trust)
        silent = [await rig.connect() for _ in range(20)]
        await eventually(lambda: rig.open_connections == 5)
        await wait_quietly()
        assert rig.open_connections == 5
        assert rig.log.lines == [
            "connection limit reached (4 connections); new connections are refused until some close"
        ]
        rig.log.lines.clear()
        assert [await wire.read_ending() for wire in silent[5:]] == ["closed"] * 15
        await rig.pass_time(19)
        assert rig.open_connections == 5
        await rig.pass_time(2)
        await eventually(lambda: rig.open_connections == 0)
        await is_served(rig, trust)
        half, noisy = [await rig.connect() for _ in range(2)]
        await half.send(b"\x16\x03\x01\x02\x00\x01\x00")
        half.half_close()
        await noisy.send(b"GET / HTTP/1.1\r\n\r\n")
        await eventually(lambda: rig.open_connections == 0)
    await eventually(lambda: descriptors() <= before + 2)  # a loop's own


@on_both_loops
async def test_excess_handshakes_close_oldest(tmp_path: Path) -> None:
    async with over_tls(tmp_path, handshakes=3) as (rig, trust):
        silent = [await rig.connect() for _ in range(3)]
        await eventually(lambda: rig.open_connections == 3)
        await is_served(rig, trust)
        await eventually(lambda: rig.open_connections == 2)
        assert await silent[0].read_ending() in ("closed", "reset")
        late = [await rig.connect() for _ in range(3)]
        for wire in silent[1:]:
            assert await wire.read_ending() in ("closed", "reset")
        await eventually(lambda: rig.open_connections == 3)
        for wire in late:
            wire.close()


@on_both_loops
async def test_handshake_does_not_delay_drain(tmp_path: Path) -> None:
    async with over_tls(tmp_path) as (rig, _):
        wire = await rig.connect()
        await eventually(lambda: rig.open_connections == 1)
        draining = asyncio.create_task(rig.listener.drain(25))
        await eventually(lambda: rig.open_connections == 0)
        await rig.pass_time(0.05)
        await draining
        assert await wire.read_ending() in ("closed", "reset")
        with pytest.raises(ConnectionRefusedError):
            await rig.connect()
