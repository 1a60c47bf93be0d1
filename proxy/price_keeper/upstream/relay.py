"""Relay one response from Bedrock to the caller: forwarded as it arrives, observed, never altered.

If the caller leaves, the rest is still read within bounds, because the usage comes last; while `retry_joiner` keeps the
response for a retry, its bounds hold first. If Bedrock breaks off, the caller's response is aborted, because a clean
end would look like success.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from price_keeper.exchange import Header, Responder
from price_keeper.telemetry.request_stats import OperationStats
from price_keeper.upstream.connection_pool import UpstreamConnection

FORBIDDEN: Final = 403
_ERROR_TYPE_HEADER: Final = b"x-amzn-errortype"

# AWS's names for a refused signature. It is always the sidecar's own: the caller's is never sent upstream.
CREDENTIAL_ERRORS: Final = frozenset(
    (
        "ExpiredTokenException",
        "IncompleteSignatureException",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "UnrecognizedClientException",
    )
)

# These headers belong to each connection; every other header of Bedrock's reaches the caller.
_CONNECTION_HEADERS: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_PLAIN_CONNECTION: Final = (b"", b"keep-alive", b"close")  # values that name no further header of the connection

# Limits for draining: after the caller has left, the rest of the response is still read, because its usage comes last.
DRAIN_SECONDS = 120.0
DRAIN_BYTES = 32 * 1024 * 1024  # read from Bedrock, framing included


class ResponseObserver(Protocol):
    """Observes a response. It must not raise, as the caller's response must not depend on it."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Names are in lower case; of a repeated header the last value is given."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, is_whole: bool) -> None:
        """Called before the last byte goes to the caller, so that the usage is recorded by then."""


@dataclass(frozen=True, slots=True)
class ResponseOutcome:
    """How a response ended. `is_withheld`: nothing of it was shown to the caller, and the call was certainly not
    executed. If the status is `FORBIDDEN` then, Bedrock refused the sidecar's own credentials."""

    status: int  # 0 if no head came
    is_whole: bool
    is_withheld: bool
    error: str = ""


SUCCESS: Final = ResponseOutcome(200, True, False)  # shared, because most responses end like this


def parse_error_type(value: bytes) -> str:
    """Return the name of an error from its header; services surround it with a namespace."""
    return value.decode("latin-1").partition(":")[0].rpartition("#")[2]


def _find_credentials_error(headers: list[Header]) -> str:
    """Return the error about the sidecar's credentials and AWS's time of it; empty for any other error."""
    by_name = dict(headers)
    kind = parse_error_type(by_name.get(_ERROR_TYPE_HEADER, b""))
    return f"{kind}, on {by_name.get(b'date', b'').decode('latin-1')}" if kind in CREDENTIAL_ERRORS else ""


def _has_unknown_coding(headers: list[Header]) -> bool:
    return any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers)


class Relay:
    """Connects one upstream connection (as its sink) with one responder (as its flow control)."""

    __slots__ = (
        "_connection",
        "_drained_from",
        "_is_complete",
        "_is_draining",
        "_now",
        "_observer",
        "_on_done",
        "_received_at",
        "_responder",
        "_response_headers",
        "_stats",
        "_status",
        "_withheld_reason",
        "_withheld_status",
    )  # fmt: skip

    def __init__(
        self,
        responder: Responder,
        connection: UpstreamConnection,
        response_headers: Sequence[Header],
        observer: ResponseObserver,
        withheld_status: int | None,
        now: Callable[[], float],
        on_done: Callable[[ResponseOutcome], None],
        stats: OperationStats | None = None,
        received_at: float = 0.0,
    ) -> None:
        """A response of the status `withheld_status` is not shown. `on_done` gets the outcome exactly once, and
        `stats` the timing of a response that was shown, measured from `received_at`."""
        self._responder = responder
        self._connection = connection
        self._response_headers = response_headers
        self._observer = observer
        self._withheld_status = withheld_status
        self._now = now
        self._on_done: Callable[[ResponseOutcome], None] | None = on_done
        self._stats = stats
        self._received_at = received_at
        self._status = 0
        self._withheld_reason = ""  # if set, nothing of the response is shown
        self._is_draining = False
        self._drained_from = 0  # the connection's byte count when draining began
        self._is_complete = False

    # The sink: events of the upstream connection.

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        if status == self._withheld_status:
            self._withheld_reason = "throttled"
        elif status == FORBIDDEN:
            self._withheld_reason = _find_credentials_error(headers)
        if self._withheld_reason:
            self._drained_from = self._connection.received_bytes
            return
        by_name = dict(headers)
        if b"transfer-encoding" in by_name and _has_unknown_coding(headers):
            self._status = 0
            self._connection.give_up("Bedrock's answer has a transfer coding that was not requested")
            return
        relayed = [header for header in headers if header[0] not in _CONNECTION_HEADERS]
        nominated = by_name.get(b"connection", b"").lower()
        if nominated not in _PLAIN_CONNECTION:
            names = {name.strip() for name in nominated.split(b",")}
            relayed = [header for header in relayed if header[0] not in names]
        self._observer.on_head(status, by_name)
        relayed += self._response_headers
        length = by_name.get(b"content-length")
        self._responder.start(status, relayed, None if length is None else int(length))

    def on_data(self, data: bytes, is_last: bool) -> None:
        self._is_complete = is_last
        if is_last:
            connection = self._connection  # it may carry another call before this method ends
            sent, first, last = connection.called_at, connection.answered_at, connection.last_active_at
        try:
            if not self._withheld_reason:
                if data:
                    self._observer.on_data(data)
                if is_last:
                    self._observer.on_end(True)
            if self._withheld_reason or self._is_draining:
                if not is_last:
                    self._drain()
            else:
                if data:
                    self._responder.write(data)
                elif not is_last:
                    self._responder.flush()
                if is_last:
                    self._responder.finish()
        finally:  # `on_done` must be called in any case
            if is_last:
                self._record_timing(self._status, sent, first, last)
                withheld = self._withheld_reason
                self._finish(
                    SUCCESS if self._status == 200 else ResponseOutcome(self._status, True, bool(withheld), withheld)
                )

    def on_broken(self, reason: str) -> None:
        self._is_complete = True
        try:
            if self._status and not self._withheld_reason:
                self._observer.on_end(False)
                connection = self._connection
                self._record_timing(0, connection.called_at, connection.answered_at, connection.last_active_at)
                # Most clients would take a clean end for success.
                self._responder.abort()
        finally:
            is_withheld = bool(self._withheld_reason) or not (self._status or self._connection.is_written)
            self._finish(ResponseOutcome(self._status, False, is_withheld, self._withheld_reason or reason))

    def _drain(self) -> None:
        """Give the connection up if too much arrives that is not shown to the caller."""
        if self._connection.received_bytes - self._drained_from > DRAIN_BYTES:
            why = "Bedrock refused the call" if self._withheld_reason else "the caller left"
            self._connection.give_up(f"{why}, and the answer did not end")

    def _record_timing(self, status: int, sent: float, first: float, last: float) -> None:
        stats = self._stats
        if stats is not None and not self._withheld_reason:
            stats.record_response(status, self._received_at, sent, first, last, self._now())

    def _finish(self, outcome: ResponseOutcome) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            on_done(outcome)

    # Flow control: how fast the caller reads.

    # The connection may already serve another call by the time the caller has read the end of this one.

    def pause(self) -> None:
        if not (self._is_draining or self._is_complete):
            self._connection.pause()

    def resume(self) -> None:
        if not self._is_complete:
            self._connection.resume()

    def on_stalled(self, seconds: float) -> None:
        pass  # the caller's own connection has a write timeout

    def on_disconnected(self) -> None:
        if self._is_draining or self._is_complete:
            return
        self._is_draining = True
        self._drained_from = self._connection.received_bytes
        self._connection.deadline = self._now() + DRAIN_SECONDS
        self.resume()
