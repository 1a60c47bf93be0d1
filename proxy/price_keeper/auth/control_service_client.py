"""The HTTP client with which a sidecar fetches credentials from the control service.

It follows no redirects and uses no proxy, because the request carries a secret. An answer that is too large, too
slow or malformed raises ControlServiceFailed, whose message never quotes what was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from price_keeper.auth.credential_relay import AskControlService, ControlReply, ControlServiceFailed
from price_keeper.client_tls import get_client_context

REPLY_TIMEOUT_SECONDS = 5.0  # SDKs soon give up on container credentials, and ask again
MAX_CONNECTIONS = 32  # more than MAX_FIRST_FETCHES, so that refreshes find a free connection
MAX_REPLY_BYTES = 64 * 1024  # a reply holds a token of one or two thousand bytes


@asynccontextmanager
async def open_control_service(url: str) -> AsyncIterator[AskControlService]:
    """Open the client; it follows no redirects and uses no proxy, as its requests carry a secret."""
    tls = await asyncio.to_thread(get_client_context) if url.startswith("https:") else True
    session = aiohttp.ClientSession(
        # No connection is reused: aiohttp takes bytes that arrive on an idle one for the next response, which would be
        # another client's credentials. Credentials are fetched only twice an hour.
        connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, force_close=True, ssl=tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=REPLY_TIMEOUT_SECONDS),
        auto_decompress=False,  # a decompressed body could exceed MAX_REPLY_BYTES
        trust_env=False,
    )

    async def ask(authorization: str) -> ControlReply:
        headers = {"Authorization": authorization, "Accept-Encoding": "identity"}
        try:
            async with session.get(f"{url}/credentials", headers=headers, allow_redirects=False) as answer:
                return ControlReply(
                    answer.status, await _read_body(answer), _parse_retry_after(answer.headers.get("Retry-After", ""))
                )
        except TimeoutError:
            raise ControlServiceFailed(
                f"{url} did not answer within {REPLY_TIMEOUT_SECONDS:g} s", is_away=True
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as failure:
            is_away = isinstance(failure, aiohttp.ClientConnectionError | OSError)
            raise ControlServiceFailed(f"{url}: {_describe_failure(failure)}", is_away=is_away) from None

    try:
        yield ask
    finally:
        await session.close()


async def _read_body(answer: aiohttp.ClientResponse) -> bytes:
    body = b""
    async for part in answer.content.iter_chunked(MAX_REPLY_BYTES):
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise ValueError("its answer is too large")
    return body


def _parse_retry_after(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None


def _describe_failure(failure: Exception) -> str:
    """Describe the failure without quoting what was sent, as some of aiohttp's messages do."""
    if isinstance(failure, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(failure, aiohttp.ClientConnectorError):
        return failure.os_error.strerror or type(failure).__name__
    return type(failure).__name__
