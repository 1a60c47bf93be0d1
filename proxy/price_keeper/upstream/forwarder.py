"""Forward a call to the first target that accepts it.

START HERE: `Forwarder.forward`. The call is signed and sent once to each target in turn, until one responds with a
status that may be shown. The next target is tried only if the call was certainly not executed: no connection, a break
before the call was written, status 429, or the sidecar's own credentials refused. The response is relayed while it
arrives (`relay.py`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from price_keeper.bounded_dict import BoundedDict
from price_keeper.client_tls import get_client_context
from price_keeper.clock import Clock
from price_keeper.errors import ConfigError, TooManyRequests, UpstreamUnavailable
from price_keeper.exchange import Header, Responder
from price_keeper.tasks import switch_to_task
from price_keeper.telemetry.request_stats import OperationStats
from price_keeper.upstream.aws_credentials import CredentialSource
from price_keeper.upstream.connection_pool import (
    CannotConnect,
    ConnectionPool,
    ScheduleWrite,
    UpstreamConnection,
    UpstreamEndpoint,
    write_now,
)
from price_keeper.upstream.relay import FORBIDDEN, SUCCESS, Relay, ResponseObserver, ResponseOutcome
from price_keeper.upstream.sigv4 import Signer
from price_keeper.upstream.upstream_health import UpstreamHealth

THROTTLED: Final = 429  # throttling, or a model that is not ready; the call was certainly not executed

MAX_SIGNERS: Final = 64  # AWS has about half as many regions

# All others are signed: the content type, and x-amzn-bedrock-... A trace id is not, as in every SDK, because load
# balancers change it.
_UNSIGNED_HEADERS: Final = frozenset(
    (
        "accept",
        "amz-sdk-invocation-id",
        "amz-sdk-request",
        "traceparent",
        "tracestate",
        "user-agent",
        "x-amzn-trace-id",
    )
)

_CREDENTIALS_REFUSED: Final = (
    "Bedrock refuses the sidecar's own AWS credentials, which its operator must correct; the caller's are valid"
)


class UpstreamTarget(NamedTuple):
    """An endpoint and model that can execute a call. `path` is encoded, as it is sent."""

    endpoint: UpstreamEndpoint
    region: str
    model: str
    path: str


def _hash_body(body: bytes) -> str:
    return sha256(body).hexdigest()


@dataclass(slots=True)  # not frozen, because that takes three times as long to create
class UpstreamCall:
    method: str
    query: str  # in canonical form
    headers: Sequence[tuple[str, str]]  # to send, with names in lower case
    body_for: Callable[[str], bytes]  # by model, because some bodies name it
    targets: Sequence[UpstreamTarget]  # in the order in which they are tried
    stats: OperationStats | None = None  # counters that this call is added to
    received_at: float = 0.0  # when the request was received, on the monotonic clock
    hash_body: Callable[[bytes], str] = _hash_body  # SHA-256, in hexadecimal digits


class CallObserver(ResponseObserver, Protocol):
    """A response observer that is also notified about where a call is sent."""

    def on_sent(self, target: UpstreamTarget) -> None: ...

    def on_not_executed(self) -> None:
        """The target certainly did not execute the call."""


class Authorizer(Protocol):
    """Proves to Bedrock who calls."""

    def build_header_lines(self, call: UpstreamCall, target: UpstreamTarget, host: str, body: bytes) -> bytes:
        """Return the header lines that authorize the call, each ending in CRLF. Raises UpstreamUnavailable if it has
        no credentials."""

    def check(self) -> str | None:
        """Return a warning about the credentials, or None. Raises UpstreamUnavailable if there are none."""

    def on_refused(self) -> None:
        """Bedrock refused the credentials behind these lines."""


class BearerAuthorizer:
    """Authorizes with a Bedrock API key. Raises ConfigError for an unusable key.

    Files and variables often end in a newline, which is not part of the key.
    """

    def __init__(self, key: str) -> None:
        key = key.strip()
        if not key or not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError(["the key for Bedrock, a bearer token, is printable ASCII without spaces"])
        self._header_lines = f"authorization: Bearer {key}\r\n".encode()

    def build_header_lines(self, call: UpstreamCall, target: UpstreamTarget, host: str, body: bytes) -> bytes:  # noqa: ARG002 - the same for every call
        return self._header_lines

    def check(self) -> None:
        pass

    def on_refused(self) -> None:
        pass


class SigV4Authorizer:
    """Signs every call with AWS credentials; one signer per region, of which the last MAX_SIGNERS are kept."""

    def __init__(self, credentials: CredentialSource, now: Callable[[], float]) -> None:
        self._credentials = credentials
        self._now = now
        self._signers = BoundedDict[str, Signer](MAX_SIGNERS)  # apps' own labels may name any region

    def build_header_lines(self, call: UpstreamCall, target: UpstreamTarget, host: str, body: bytes) -> bytes:
        signer = self._signers.get(target.region)
        if signer is None:
            signer = self._signers[target.region] = Signer(target.region)
        signed = [header for header in call.headers if header[0] not in _UNSIGNED_HEADERS]
        credentials = self._credentials.current()
        return signer.sign(
            credentials, call.method, target.path, call.query, host, signed, call.hash_body(body), self._now()
        )

    def check(self) -> str | None:
        self._credentials.current()
        return self._credentials.problem

    def on_refused(self) -> None:
        self._credentials.on_refused()


class Forwarder:
    """Sends calls to Bedrock, over one connection pool per endpoint."""

    def __init__(
        self,
        authorizer: Authorizer,
        clock: Clock,
        tls: ssl.SSLContext | None = None,
        schedule_write: ScheduleWrite = write_now,
    ) -> None:
        """`schedule_write` writes a call's bytes to its connection."""
        self._schedule_write = schedule_write
        self._authorizer = authorizer
        self._clock = clock
        self._now = clock.monotonic
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._configured: frozenset[UpstreamEndpoint] | None = None
        self._pools: dict[UpstreamEndpoint, ConnectionPool] = {}
        self._hosts: dict[UpstreamEndpoint, str] = {}
        self.health = UpstreamHealth(clock, authorizer.check, self._pool)

    async def forward(
        self, call: UpstreamCall, responder: Responder, response_headers: Sequence[Header], observer: CallObserver
    ) -> ResponseOutcome:
        """Send the call and relay its response. Raises UpstreamUnavailable or TooManyRequests if no endpoint returned
        the head of a response that may be shown."""
        last_withheld_status = 0  # of the last response that was not shown
        for number, target in enumerate(call.targets):
            is_last = number + 1 == len(call.targets)
            body = call.body_for(target.model)
            head = self._head(call, target, body)
            pool = self._pools.get(target.endpoint) or self._pool(target.endpoint)
            connection = pool.take_idle() or await self._connect(pool)
            if connection is None:
                continue
            if self._is_closed:
                connection.close()
                raise UpstreamUnavailable("the sidecar is stopping", retry_after=1)
            if responder.is_disconnected:
                pool.release(connection)
                raise UpstreamUnavailable("the caller left before its call was sent")
            done: asyncio.Future[ResponseOutcome] = self._loop.create_future()
            relay = Relay(
                responder,
                connection,
                response_headers,
                observer,
                None if is_last else THROTTLED,
                self._now,
                partial(_resolve, done),
                call.stats,
                call.received_at,
            )
            responder.attach(relay)
            observer.on_sent(target)
            connection.call(relay, head, body)
            outcome = await done
            if outcome is SUCCESS or not self._should_try_next(outcome, target, observer):
                return outcome
            last_withheld_status = outcome.status or last_withheld_status
        if last_withheld_status == FORBIDDEN:
            raise UpstreamUnavailable(_CREDENTIALS_REFUSED, retry_after=5)
        if last_withheld_status == THROTTLED:
            raise TooManyRequests("Bedrock throttles this model, and no other target can take the call", retry_after=1)
        raise UpstreamUnavailable("Bedrock cannot be reached", retry_after=1)

    def _should_try_next(self, outcome: ResponseOutcome, target: UpstreamTarget, observer: CallObserver) -> bool:
        """Whether to try the next target. Raises UpstreamUnavailable if the call may have been executed."""
        if outcome.is_withheld:
            if outcome.status == FORBIDDEN:
                self.health.on_credentials_refused(target.endpoint, outcome.error)
                self._authorizer.on_refused()
            observer.on_not_executed()
            return True
        if not outcome.status:
            # The call may have been executed and billed, so the caller must decide whether to send it again.
            raise UpstreamUnavailable(outcome.error)
        return False

    async def _connect(self, pool: ConnectionPool) -> UpstreamConnection | None:
        """Connect, or log why not and return None. The address is only logged: callers must not learn internals."""
        await switch_to_task()
        try:
            connection = await pool.connect()
        except (CannotConnect, UnicodeError) as failure:  # UnicodeError: no host can have this name
            self.health.on_connect_failed(pool, failure)
            return None
        self.health.on_connected(pool.endpoint)
        return connection

    def _head(self, call: UpstreamCall, target: UpstreamTarget, body: bytes) -> bytes:
        host = self._hosts.get(target.endpoint) or format_host(target.endpoint)
        query = f"?{call.query}" if call.query else ""
        headers = "\r\n".join(map(": ".join, call.headers))
        if headers:
            headers += "\r\n"
        length = f"content-length: {len(body)}\r\n" if body or call.method == "POST" else ""
        head = f"{call.method} {target.path}{query} HTTP/1.1\r\nhost: {host}\r\n{headers}{length}"
        return head.encode() + self._authorizer.build_header_lines(call, target, host, body) + b"\r\n"

    def _pool(self, endpoint: UpstreamEndpoint) -> ConnectionPool:
        pool = self._pools.get(endpoint)
        if pool is None:
            if endpoint.is_tls and self._tls is None:
                self._tls = get_client_context()
            tls = self._tls if endpoint.is_tls else None
            pool = self._pools[endpoint] = ConnectionPool(endpoint, self._clock.monotonic, tls, self._schedule_write)
            self._hosts[endpoint] = format_host(endpoint)
        return pool

    @property
    def connection_counts(self) -> tuple[int, int]:
        """Numbers of connections that carry a call, and of idle ones."""
        busy, idle = zip((0, 0), *(pool.counts for pool in self._pools.values()), strict=True)
        return sum(busy), sum(idle)

    async def check_timeouts(self) -> None:
        for endpoint, pool in tuple(self._pools.items()):
            pool.check_timeouts()
            if self._configured is not None and endpoint not in self._configured and pool.is_unused:
                del self._pools[endpoint], self._hosts[endpoint]
                self.health.forget(endpoint)

    def set_endpoints(self, endpoints: Collection[UpstreamEndpoint]) -> None:
        """Apply a new configuration. Pools of other endpoints are removed once no call uses them."""
        self._configured = frozenset(endpoints)
        self.health.set_expected(endpoints)

    def close(self) -> None:
        """Abort the calls in flight; no further call is sent."""
        self._is_closed = True
        for pool in self._pools.values():
            pool.close()


def _resolve(done: asyncio.Future[ResponseOutcome], outcome: ResponseOutcome) -> None:
    if not done.done():
        done.set_result(outcome)


def parse_endpoint(url: str) -> UpstreamEndpoint:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return UpstreamEndpoint(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls)


def format_host(endpoint: UpstreamEndpoint) -> str:
    is_default = endpoint.port == (443 if endpoint.is_tls else 80)
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return host if is_default else f"{host}:{endpoint.port}"
