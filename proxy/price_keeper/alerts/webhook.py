"""One signed HTTPS request to the operator's webhook, to a public address and nowhere else (SSRF protection).

Addresses are checked twice: all that a name resolves to, and again where the socket is made, because a literal
address is never resolved. The checked address is the one that is connected to, so DNS rebinding has no effect. The
list of networks that are not public is our own, because that of Python's `ipaddress` differs between versions.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, TypeAlias

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from price_keeper.client_tls import get_client_context

RESPONSE_TIMEOUT_SECONDS = 10.0  # from the DNS lookup to the head of the response
READ_BUFFER_BYTES = 4096  # read at a time; the body of a response is ignored

_USER_AGENT = "bedrock-price-keeper"

IsAllowed: TypeAlias = Callable[[str], bool]

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "10.0.0.0/8",
            "100.64.0.0/10",  # carriers' own, and metadata in some clouds
            "127.0.0.0/8",
            "168.63.129.16/32",  # public by its form, but it is Azure's metadata
            "169.254.0.0/16",  # link-local, and most clouds' metadata
            "172.16.0.0/12",
            "192.0.0.0/24",  # protocols, and Oracle's metadata
            "192.0.2.0/24",
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))  # Teredo is in the first
_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")


def is_public_address(address: str) -> bool:
    """Whether this is the address of a public host. Anything that is no IP address is not."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return _is_public_v6(parsed) if isinstance(parsed, IPv6Address) else _is_public_v4(parsed)


def _is_public_v6(address: IPv6Address) -> bool:
    embedded = _extract_ipv4(address)
    if embedded is not None:
        return _is_public_v4(embedded)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)


def _is_public_v4(address: IPv4Address) -> bool:
    return not any(address in network for network in _NOT_PUBLIC_V4)


def _extract_ipv4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address to which packets really go, if the IPv6 address only embeds one; otherwise None."""
    if address in _IPV4_MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return IPv4Address(int(address) >> 80 & 0xFFFFFFFF) if address in _6TO4 else None


class ForbiddenAddress(OSError):
    """The webhook's address is not public. An OSError, because aiohttp expects that of resolvers and sockets."""


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """The result of one request. `status` is None if there was no response, and `error` then says why."""

    status: int | None
    error: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_rejected(self) -> bool:
        """Whether the receiver rejected the request for good, so that a retry would not help."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in (408, 429)

    def __str__(self) -> str:
        return self.error or f"response status {self.status}"


class WebhookSender:
    """Sends signed requests to the operator's webhook. Only `host_and_port` may be logged: the path or query of a
    webhook URL often authorizes whoever knows it to send."""

    def __init__(
        self,
        url: str,
        secret: bytes,
        now: Callable[[], float],
        *,
        is_allowed: IsAllowed = is_public_address,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
        seconds: float = RESPONSE_TIMEOUT_SECONDS,
    ) -> None:
        self._url = URL(url, encoded=True)  # sent as it was written
        if self._url.scheme != "https":
            raise ValueError("a webhook's address begins with https://")
        self.host_and_port = f"{self._url.host}:{self._url.port}"
        self._secret = secret
        self._now = now
        self._is_allowed = is_allowed
        self._resolver = resolver
        self._tls = tls
        self._timeout_seconds = seconds
        self._session: ClientSession | None = None

    async def send(self, delivery_id: str, body: bytes) -> WebhookResponse:
        """Sends one request. Never raises, so that no traceback can contain the URL."""
        headers = self._build_headers(delivery_id, body)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                self._tls = self._tls or await asyncio.to_thread(get_client_context)
                posting = self._get_session().post(self._url, data=body, headers=headers, allow_redirects=False)
                async with posting as response:
                    return WebhookResponse(response.status)
        except TimeoutError:
            return WebhookResponse(None, f"no answer within {self._timeout_seconds:g} s")
        except Exception as error:
            return WebhookResponse(None, _describe_error(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _build_headers(self, delivery_id: str, body: bytes) -> dict[str, str]:
        timestamp = str(int(self._now()))
        return {
            "content-type": "application/json",
            "user-agent": _USER_AGENT,
            "accept-encoding": "identity",
            "x-price-keeper-delivery": delivery_id,
            "x-price-keeper-timestamp": timestamp,
            "x-price-keeper-signature": compute_signature(self._secret, timestamp, body),
        }

    def _get_session(self) -> ClientSession:
        if self._session is None:
            connector = TCPConnector(
                resolver=AllowedAddressResolver(self._is_allowed, self._resolver or ThreadedResolver()),
                socket_factory=self._create_socket,
                use_dns_cache=False,
                force_close=True,  # alerts are few, and the address of each connection is checked
                ssl=self._tls or True,
            )
            self._session = ClientSession(
                connector=connector,
                cookie_jar=DummyCookieJar(),
                timeout=ClientTimeout(total=None),  # `send` has its own timeout
                auto_decompress=False,
                read_bufsize=READ_BUFFER_BYTES,
                trust_env=False,  # a proxy would connect to an address that is not checked
            )
        return self._session

    def _create_socket(self, address_info: Any) -> socket.socket:
        family, kind, protocol, _, address = address_info
        _require_allowed(self._is_allowed, str(address[0]))
        return socket.socket(family, kind, protocol)


class AllowedAddressResolver(AbstractResolver):
    """Resolves a name only if all of its addresses are allowed; otherwise raises ForbiddenAddress."""

    def __init__(self, is_allowed: IsAllowed, resolver: AbstractResolver) -> None:
        self._is_allowed = is_allowed
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        results = await self._resolver.resolve(host, port, family)
        for result in results:
            _require_allowed(self._is_allowed, result["host"])
        return results

    async def close(self) -> None:
        await self._resolver.close()


def _require_allowed(is_allowed: IsAllowed, address: str) -> None:
    if not is_allowed(address):
        raise ForbiddenAddress(f"its address is not a public one: {address}")


def compute_signature(secret: bytes, timestamp: str, body: bytes) -> str:
    return f"v1={hmac.digest(secret, timestamp.encode() + b'.' + body, 'sha256').hex()}"


def _describe_error(error: Exception) -> str:
    """A description without the URL, which aiohttp's own messages often contain."""
    if isinstance(error, ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(error, ClientConnectorError):
        cause = error.os_error
        return (
            str(cause)
            if isinstance(cause, ForbiddenAddress)
            else f"not reached: {cause.strerror or type(cause).__name__}"
        )
    return f"no whole answer: {type(error).__name__}"
