"""One answer on its way from Bedrock to the caller: handed on as it comes, watched, never altered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from price_keeper.exchange import Header, Responder
from price_keeper.forwarding.upstream import UpstreamConnection
from price_keeper.traffic import OperationStats

FORBIDDEN: Final = 403
_KIND: Final = b"x-amzn-errortype"

# What AWS calls it when it does not take a signature, which is ours and not the caller's: his never travels upstream.
NOT_OUR_CREDENTIALS: Final = frozenset(
    (
        "ExpiredTokenException",
        "IncompleteSignatureException",
        "InvalidSignatureException",
        "MissingAuthenticationTokenException",
        "UnrecognizedClientException",
    )
)

# The framing is each connection's own; every other header of Bedrock's reaches the caller.
_OURS_ALONE: Final = frozenset(
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

_PLAIN_CONNECTION: Final = (b"", b"keep-alive", b"close")  # names no other header that is the connection's own

# When the caller leaves, the rest of the answer is still read, because its usage comes last.
DRAIN_SECONDS = 120.0
DRAIN_BYTES = 32 * 1024 * 1024  # read from Bedrock, framing included


class ResponseObserver(Protocol):
    """Sees what goes by. It must not raise: the caller's answer does not depend on it."""

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Names in lower case; of a header that comes twice, the last."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, is_whole: bool) -> None:
        """Before the last byte goes to the caller, so that what is counted is counted by then."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an answer came to its end. `held_back`: nothing of it was shown to the caller, and the call was surely not
    carried out; if its status is `FORBIDDEN` the trouble is with our own credentials."""

    status: int  # 0 when not even a head came
    is_whole: bool
    held_back: bool
    trouble: str = ""


_GOOD: Final = Outcome(200, True, False)  # as most are


def kind_of(value: bytes) -> str:
    """From what a header says of an error: services put a name space around its name."""
    return value.decode("latin-1").partition(":")[0].rpartition("#")[2]


def _refusal_of_us(headers: list[Header]) -> str:
    """What is the trouble with our credentials, and when by AWS's clock; empty if it is with something else."""
    found = dict(headers)
    kind = kind_of(found.get(_KIND, b""))
    return f"{kind}, on {found.get(b'date', b'').decode('latin-1')}" if kind in NOT_OUR_CREDENTIALS else ""


def _has_other_coding(headers: list[Header]) -> bool:
    return any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in headers)


class Relay:
    """Between one upstream connection (as its sink) and one responder (as its flow)."""

    __slots__ = ("_added", "_began", "_connection", "_drained_from", "_held_back", "_hidden", "_is_drained",
                 "_is_over", "_lane", "_now", "_over", "_responder", "_status", "_observer")  # fmt: skip

    def __init__(
        self,
        responder: Responder,
        connection: UpstreamConnection,
        added: Sequence[Header],
        observer: ResponseObserver,
        held_back: int | None,
        now: Callable[[], float],
        over: Callable[[Outcome], None],
        lane: OperationStats | None = None,
        began: float = 0.0,
    ) -> None:
        """An answer of the status `held_back` is not shown. `over` is told once how the answer came to its end, and
        `lane` how long one that was shown took, since the request was here (`began`)."""
        self._responder = responder
        self._connection = connection
        self._added = added
        self._observer = observer
        self._held_back = held_back
        self._now = now
        self._over: Callable[[Outcome], None] | None = over
        self._lane = lane
        self._began = began
        self._status = 0
        self._hidden = ""  # why nothing of the answer is shown
        self._is_drained = False
        self._drained_from = 0  # of what the connection received: from here on nobody is shown any of it
        self._is_over = False
        if responder.is_disconnected:
            self.on_disconnected()

    # The sink: what Bedrock says.

    def on_head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        if status == self._held_back:
            self._hidden = "throttled"
        elif status == FORBIDDEN:
            self._hidden = _refusal_of_us(headers)
        if self._hidden:
            self._drained_from = self._connection.received_bytes
            return
        found = dict(headers)
        if b"transfer-encoding" in found and _has_other_coding(headers):
            self._status = 0
            self._connection.give_up("Bedrock's answer comes in a transfer coding that nobody asked for")
            return
        shown = [header for header in headers if header[0] not in _OURS_ALONE]
        nominated = found.get(b"connection", b"").lower()
        if nominated not in _PLAIN_CONNECTION:
            names = {name.strip() for name in nominated.split(b",")}
            shown = [header for header in shown if header[0] not in names]
        self._observer.on_head(status, found)
        shown += self._added
        length = found.get(b"content-length")
        self._responder.start(status, shown, None if length is None else int(length))

    def on_data(self, data: bytes, is_last: bool) -> None:
        self._is_over = is_last
        if is_last:
            connection = self._connection  # which may carry another call before this is over
            sent, first, last = connection.called_at, connection.answered_at, connection.last_active_at
        try:
            if not self._hidden:
                if data:
                    self._observer.on_data(data)
                if is_last:
                    self._observer.on_end(True)
                self._show(data, is_last)
            elif not is_last:
                self._drain()
        finally:  # whoever waits must be told in any case
            if is_last:
                self._took(self._status, sent, first, last)
                hidden = self._hidden
                self._end(_GOOD if self._status == 200 else Outcome(self._status, True, bool(hidden), hidden))

    def on_broken(self, reason: str) -> None:
        self._is_over = True
        try:
            if self._status and not self._hidden:
                self._observer.on_end(False)
                connection = self._connection
                self._took(0, connection.called_at, connection.answered_at, connection.last_active_at)
                # A clean end would look like success to most clients.
                self._responder.abort()
        finally:
            is_held_back = bool(self._hidden) or not (self._status or self._connection.is_written)
            self._end(Outcome(self._status, False, is_held_back, self._hidden or reason))

    def _show(self, data: bytes, is_last: bool) -> None:
        if self._is_drained:
            if not is_last:
                self._drain()
            return
        if data:
            self._responder.write(data)
        elif not is_last:
            self._responder.flush()
        if is_last:
            self._responder.finish()

    def _drain(self) -> None:
        """Ends what takes too much to read that nobody is shown."""
        if self._connection.received_bytes - self._drained_from > DRAIN_BYTES:
            why = "Bedrock refused the call" if self._hidden else "the caller left"
            self._connection.give_up(f"{why}, and the answer did not end")

    def _took(self, status: int, sent: float, first: float, last: float) -> None:
        lane = self._lane
        if lane is not None and not self._hidden:
            lane.record_response(status, self._began, sent, first, last, self._now())

    def _end(self, outcome: Outcome) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(outcome)

    # The flow: how fast the caller reads.

    # The connection may already serve another call by the time the caller has read the end of this one.

    def pause(self) -> None:
        if not (self._is_drained or self._is_over):
            self._connection.pause()

    def resume(self) -> None:
        if not self._is_over:
            self._connection.resume()

    def on_stalled(self, seconds: float) -> None:
        pass  # with the caller, whose connection has a limit of its own

    def on_disconnected(self) -> None:
        if self._is_drained or self._is_over:
            return
        self._is_drained = True
        self._drained_from = self._connection.received_bytes
        self._connection.deadline = self._now() + DRAIN_SECONDS
        self.resume()
