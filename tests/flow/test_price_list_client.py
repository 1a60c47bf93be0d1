"""What the AWS Price List is sent, and by whose libraries: signed as AWS's own would sign it, without loading them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from price_keeper.usage import price_list_client
from price_keeper.usage.price_list_client import PRICE_LIST_REGION, AwsPriceList, PriceListUnreadable

ACCESS_KEY, SECRET_KEY = "AKIDEXAMPLE", "an/example+key"


class RecordingServer:
    """Answers with `answer`; what it was sent is in `requests`."""

    def __init__(self) -> None:
        self.url = ""
        self.answer = web.Response
        self.requests: list[tuple[web.Request, bytes]] = []

    async def hear(self, request: web.Request) -> web.Response:
        self.requests.append((request, await request.read()))
        return self.answer(body=b'{"FormatVersion": "aws_v1", "PriceList": []}')


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RecordingServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    server, app = RecordingServer(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.hear)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield server
    await runner.cleanup()


@pytest.mark.parametrize("token", [None, "a-session-token"])
@pytest.mark.parametrize("path", ["", "/", "/behind/a gateway"])
async def test_request_has_the_signature_that_botocore_would_give_it(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, token: str | None, path: str
) -> None:
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    await AwsPriceList(server.url + path.replace(" ", "%20")).probe()
    ((request, body),) = server.requests
    sent = request.headers["Authorization"]
    names = sent.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert {"host", "content-type", "x-amz-target", "x-amz-date"} <= set(names)
    assert ("x-amz-security-token" in names) == (token is not None)
    theirs = AWSRequest("POST", server.url + request.raw_path, data=body)
    for name in names:
        theirs.headers[name] = request.headers[name]
    theirs.context["timestamp"] = request.headers["x-amz-date"]
    signer = SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY, token), "pricing", PRICE_LIST_REGION)
    signature = signer.signature(signer.string_to_sign(theirs, signer.canonical_request(theirs)), theirs)
    assert sent.endswith(f"Signature={signature}")
    assert request.headers["Host"] == server.url.removeprefix("http://")


async def test_endpoint_that_the_environment_names_is_asked(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", server.url)
    await AwsPriceList().probe()
    assert len(server.requests) == 1


async def test_page_beyond_all_measure_is_not_read(server: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_list_client, "MAX_PAGE_BYTES", 40)
    with pytest.raises(PriceListUnreadable, match="an answer that is not the AWS Price List's"):
        await AwsPriceList(server.url).probe()


async def test_redirect_is_not_followed(server: RecordingServer) -> None:
    def redirect(**_: Any) -> web.Response:
        return web.Response(status=307, headers={"location": server.url})

    server.answer = redirect  # type: ignore[assignment]
    with pytest.raises(PriceListUnreadable, match="answers 307"):
        await AwsPriceList(server.url).probe()
    assert len(server.requests) == 1


@pytest.mark.parametrize(("status", "attempts"), [(400, 1), (403, 1), (429, 3), (500, 3), (503, 3)])
async def test_request_that_failed_in_passing_is_repeated(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, status: int, attempts: int
) -> None:
    monkeypatch.setattr(price_list_client, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(price_list_client, "MAX_BACKOFF_SECONDS", 0.0)
    server.answer = lambda **_: web.Response(status=status)  # type: ignore[assignment]
    with pytest.raises(PriceListUnreadable, match=f"answers {status}"):
        await AwsPriceList(server.url).probe()
    assert len(server.requests) == attempts


@pytest.mark.parametrize("secret", ["", "not printable \u00e9"])
async def test_without_usable_credentials_nothing_is_sent(
    server: RecordingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, secret: str
) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    if not secret:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(PriceListUnreadable, match="credentials"):
        await AwsPriceList(server.url).probe()
    assert not server.requests


_PROBED = """
import asyncio, sys
from price_keeper import app
from price_keeper.usage.price_list_client import AwsPriceList
asyncio.run(AwsPriceList(sys.argv[1]).probe())
print(*{"aioboto3", "aiobotocore", "boto3", "botocore"} & set(sys.modules))
"""


async def test_price_list_is_read_without_the_libraries_of_aws(server: RecordingServer, tmp_path: Path) -> None:
    environment = {**os.environ, "AWS_CONFIG_FILE": str(tmp_path / "none")}
    command = [sys.executable, "-c", _PROBED, server.url]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
    assert len(server.requests) == 1
