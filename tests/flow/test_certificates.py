"""What is called over https shows a certificate that is trusted, and for its name, before it is sent anything."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import aiohttp.connector
import pytest
from price_keeper.alerts.webhook import WebhookSender
from price_keeper.auth.control_service_client import open_control_service
from price_keeper.auth.credential_relay import ControlServiceFailed
from price_keeper.client_tls import get_client_context, skip_default_authorities
from price_keeper.clock import SystemClock
from price_keeper.domain import Caller
from price_keeper.errors import Refusal, StoreError
from price_keeper.server.tls import create_server_context, ensure_local_certificates
from price_keeper.stores import dynamodb
from price_keeper.stores.contract import Key
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.upstream.connection_pool import UpstreamEndpoint
from price_keeper.upstream.forwarder import BearerAuthorizer, Forwarder, UpstreamCall, UpstreamTarget
from price_keeper.upstream.profile_models import ProfileModels
from price_keeper.usage import price_list_client
from price_keeper.usage.price_list_client import AwsPriceList, PriceListUnreadable

from tests.support.port_harness import RecordingObserver

Calls = Callable[[str, int], Awaitable[None]]
NAMED, UNNAMED = "127.0.0.1", "127.0.0.2"  # by the certificate
CASES = [(NAMED, True), (NAMED, False), (UNNAMED, True)]


async def _bedrock(host: str, port: int) -> None:
    forwarder = Forwarder(BearerAuthorizer("key"), SystemClock())
    target = UpstreamTarget(UpstreamEndpoint(host, port, is_tls=True), "here", "a-model", "/there")
    call = UpstreamCall("POST", "", [], lambda _: b"{}", [target])
    with pytest.raises(Refusal):
        await forwarder.forward(call, Mock(is_disconnected=False), (), RecordingObserver())
    forwarder.close()


async def _store(host: str, port: int) -> None:
    async def no_wait(_: float) -> None:
        pass

    endpoint = f"https://{host}:{port}"
    store = await DynamoStore(region="us-east-1", table_prefix="p-", endpoint=endpoint, sleep=no_wait).open()
    with pytest.raises(StoreError):
        await store.get(Key("config", "ORG", "CONFIG"))
    await store.close()


async def _price_list(host: str, port: int) -> None:
    with pytest.raises(PriceListUnreadable):
        await AwsPriceList(f"https://{host}:{port}").probe()


async def _web_identity(host: str, port: int) -> None:
    """What a pod shows for credentials, before anything can be signed."""
    token = Path(os.environ["SSL_CERT_FILE"])  # any file will do
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/r")
        patch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        patch.setenv("AWS_ENDPOINT_URL_STS", f"https://{host}:{port}")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        await _price_list(host, 9)


async def _control_service(host: str, port: int) -> None:
    async with open_control_service(f"https://{host}:{port}") as asking:
        with pytest.raises(ControlServiceFailed):
            await asking("client:secret")


async def _webhook(host: str, port: int) -> None:
    sender = WebhookSender(f"https://{host}:{port}", b"secret", time.time, is_allowed=lambda _: True)
    assert (await sender.send("delivery", b"{}")).error
    await sender.close()


async def _inference_profile(host: str, port: int) -> None:
    region = "us-east-1"
    profiles = ProfileModels([region], lambda _: f"https://{host}:{port}", BearerAuthorizer("key"), SystemClock())
    arn = f"arn:aws:bedrock:{region}:123456789012:application-inference-profile/abc123"
    with pytest.raises(Refusal):
        await profiles.find(arn, region, Caller("org", "app", "client"))


@pytest.fixture(autouse=True)
def _one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dynamodb, price_list_client):
        monkeypatch.setattr(module, "MAX_ATTEMPTS", 1)


@pytest.fixture(autouse=True)
def _fresh_contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a server that has just started: aiohttp's default context has no authorities, and no shared one exists."""
    with skip_default_authorities():
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context())
    get_client_context.cache_clear()
    yield
    get_client_context.cache_clear()


def _trust(authority: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
        patch.setenv(name, str(authority))


@pytest.mark.parametrize(
    "calls", [_bedrock, _store, _price_list, _web_identity, _control_service, _webhook, _inference_profile]
)
@pytest.mark.parametrize(("host", "is_trusted"), CASES)
async def test_untrusted_certificate_receives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, host: str, is_trusted: bool
) -> None:
    authority, certificate, key = ensure_local_certificates(tmp_path, time.time())
    if is_trusted:
        _trust(authority, monkeypatch)
    async with _listening(host, create_server_context(certificate, key)) as (port, heard):
        await calls(host, port)
    assert bool(heard) == (is_trusted and host == NAMED)


def test_authorities_are_skipped_only_within_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, _, _ = ensure_local_certificates(tmp_path, time.time())
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    with skip_default_authorities():
        assert _count_authorities(ssl.create_default_context()) == 0
    assert _count_authorities(ssl.create_default_context()) == 1


def _count_authorities(context: ssl.SSLContext) -> int:
    return context.cert_store_stats()["x509_ca"]


@pytest.mark.parametrize("calls", [_store, _price_list])
@pytest.mark.parametrize(("host", "is_trusted"), CASES)
async def test_untrusted_certificate_behind_proxy_receives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls, host: str, is_trusted: bool
) -> None:
    """One that the surroundings name, which only what AWS's libraries call goes through."""
    authority, certificate, key = ensure_local_certificates(tmp_path, time.time())
    if is_trusted:
        _trust(authority, monkeypatch)
    async with (
        _listening(host, create_server_context(certificate, key)) as (port, heard),
        _passing_on(host, port) as proxy,
    ):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy[0]}")
        monkeypatch.setenv("NO_PROXY", "")
        await calls(host, port)
    assert proxy[1].startswith(f"CONNECT {host}:{port} ".encode())
    assert bool(heard) == (is_trusted and host == NAMED)


Listening = tuple[int, bytearray]


@asynccontextmanager
async def _listening(host: str, tls: ssl.SSLContext) -> AsyncIterator[Listening]:
    """Its port, and what it is sent; it answers nothing."""
    heard = bytearray()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65_536))
        await _closed(writer)

    async with _serving(hear, host, tls) as port:
        yield port, heard


@asynccontextmanager
async def _passing_on(host: str, port: int) -> AsyncIterator[Listening]:
    """A proxy's port, and what it is asked for."""
    asked = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend(await reader.readuntil(b"\r\n\r\n"))
        far_reader, far_writer = await asyncio.open_connection(host, port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_piped(reader, far_writer), _piped(far_reader, writer))

    async with _serving(pass_on, "127.0.0.1", None) as own:
        yield own, asked


@asynccontextmanager
async def _serving(serve: Callable[..., Awaitable[None]], host: str, tls: ssl.SSLContext | None) -> AsyncIterator[int]:
    """All that it has begun is over at the end."""
    begun = list[asyncio.Task[None]]()

    def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.append(asyncio.ensure_future(serve(reader, writer)))

    async with await asyncio.start_server(served, host, 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1]
        async with asyncio.timeout(60):
            await asyncio.gather(*begun, return_exceptions=True)


async def _piped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
    await _closed(writer)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
