"""HTTP/2 with prior knowledge on the data port: the library `h2` keeps the protocol, this file the streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error, NoSuchStreamError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import Frame, GoAwayFrame

from proxy.exchange import Header
from proxy.surface.http2_stream import Stream
from proxy.surface.limits import Rate

if TYPE_CHECKING:
    from proxy.surface.listener import Listener

WINDOW_BYTES = 1024 * 1024  # a body comes in few round trips, and a stream holds little that was not asked for

_log = logging.getLogger("proxy.surface")


class _Protocol(H2Connection):
    """The library closes a connection whose client says that it opens no more streams, answers under way and all."""

    def _receive_goaway_frame(self, _: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        return [], [events.ConnectionTerminated()]


class Http2Connection(asyncio.Protocol):
    def __init__(self, listener: Listener, is_surplus: bool = False) -> None:
        self.listener = listener
        self.now = listener.now
        self.limits = limits = listener.limits
        self._is_surplus = is_surplus
        self._h2 = _Protocol(H2Configuration(client_side=False, header_encoding=None))
        self._streams: dict[int, Stream] = {}
        self._resets = Rate(limits.resets, limits.window_seconds, self.now)
        self._controls = Rate(limits.controls, limits.window_seconds, self.now)
        self._newest = 0
        self._is_draining = False
        self._is_closed = False
        self.is_write_paused = False
        self._heard = listener.now()
        self._paused = 0.0

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(self.limits.write_buffer_bytes)
        self.listener.joined(self)
        # They hold from the start: had they to be acknowledged first, the two sides would count windows differently.
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.limits.head_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        # A list that is a little too long gets an answer; what is far beyond ends the connection.
        self._h2.decoder.max_header_list_size = 2 * self.limits.head_bytes
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES * 4)
        self._send()
        if self.listener.is_draining:
            self.drain()

    def connection_lost(self, _: Exception | None) -> None:
        self.listener.left(self)
        self._forget_all()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._heard = self.now()
        try:
            for event in self._h2.receive_data(data):
                handle = _HANDLERS.get(type(event))
                if handle is not None and not self._is_closed:
                    handle(self, event)
        except H2Error:
            self._close()  # the library has put why into what is to be sent
            return
        self._send()
        if self._transport.get_write_buffer_size() > self.limits.control_backlog_bytes:
            self.cut()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._paused = self.now()
        for stream in self._streams.values():
            stream.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        for stream in tuple(self._streams.values()):
            stream.pump()

    def check_time(self, now: float) -> None:
        for stream in tuple(self._streams.values()):
            stream.check_time(now)
        if self._is_closed:
            if now - self._heard > self.limits.lingering_seconds:
                self._transport.abort()
        elif self.is_write_paused:
            if now - self._paused > self.limits.stalled_seconds:
                self.cut()
        elif not self._streams and now - self._heard > self.limits.idle_seconds:
            self._say_goodbye(ErrorCodes.NO_ERROR)
            self._close()

    def drain(self) -> None:
        """Tells the client to go elsewhere with what it has not sent yet, and finishes the rest."""
        self._is_draining = True
        self._say_goodbye(ErrorCodes.NO_ERROR)
        self._close_if_done()

    def cut(self) -> None:
        self._is_closed = True
        self._transport.abort()

    # What the client did.

    def _request_came(self, event: events.RequestReceived) -> None:
        if self._is_draining:
            self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._newest = event.stream_id
        stream = Stream(event.stream_id, self, is_heard_out=event.stream_ended is not None)
        self._streams[event.stream_id] = stream
        if self._is_surplus:
            stream.refuse(self.listener.too_many)
            self.drain()
        else:
            stream.take_head(event.headers or [])

    def _data_came(self, event: events.DataReceived) -> None:
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if event.stream_ended is None and not event.data:
            self._control_came(event)
        elif stream is not None:
            stream.is_heard_out = event.stream_ended is not None
            stream.take_data(event.data or b"")

    def _request_ended(self, event: events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.request_ended()

    def _stream_was_reset(self, event: events.StreamReset) -> None:
        stream = self._streams.pop(event.stream_id, None)
        if stream is not None:
            stream.left()
        if self._resets.is_exceeded():
            self._calm_down()
        self._close_if_done()

    def _control_came(self, _: events.Event) -> None:
        if self._controls.is_exceeded():
            self._calm_down()

    def _window_grew(self, event: events.WindowUpdated) -> None:
        if event.stream_id:
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.pump()
            return
        for stream in tuple(self._streams.values()):
            stream.pump()

    def _settings_changed(self, event: events.RemoteSettingsChanged) -> None:
        self._control_came(event)
        for stream in tuple(self._streams.values()):
            stream.pump()

    def _client_says_goodbye(self, _: events.ConnectionTerminated) -> None:
        self._is_draining = True
        self._close_if_done()

    # What streams call.

    def send_head(self, stream: Stream, headers: Sequence[Header]) -> None:
        try:
            self._h2.send_headers(stream.id, headers)
        except NoSuchStreamError:
            self._lost(stream)
        except H2Error as failure:
            _log.error("an answer's head cannot be sent over HTTP/2: %s", failure)
            stream.abort()

    def send_some(self, stream: Stream) -> None:
        """As much of what waits as the client's windows take, and the connection."""
        unsent = 0
        try:
            while stream.outgoing and not self.is_write_paused:
                room = min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size)
                if room <= 0:
                    return
                data = stream.take_outgoing(room)
                self._h2.send_data(stream.id, data)
                unsent += len(data)
                if unsent > self.limits.write_buffer_bytes:
                    self._send()
                    unsent = 0
            if stream.is_finished and not stream.outgoing:
                self._h2.end_stream(stream.id)
                if not stream.is_heard_out:
                    self._reset(stream.id, ErrorCodes.NO_ERROR)  # the client need not send the rest
                self.forget(stream)
        except NoSuchStreamError:
            self._lost(stream)

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        self._reset(stream.id, code)
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._heard = self.now()
        self._send()
        self._close_if_done()

    def flush(self) -> None:
        self._send()

    # What goes out.

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        if not self._is_closed:
            try:
                self._h2.reset_stream(stream_id, code)
            except NoSuchStreamError:
                return
            self._send()

    def _lost(self, stream: Stream) -> None:
        """The client has reset it; the library knows already, and we shall hear of it next."""
        self._streams.pop(stream.id, None)
        stream.left()

    def _send(self) -> None:
        if not self._is_closed and (data := self._h2.data_to_send()):
            self._transport.write(data)

    def _say_goodbye(self, code: ErrorCodes) -> None:
        # The library would take the connection for closed; streams under way must still be answered.
        self._send()
        if not self._is_closed:
            self._transport.write(GoAwayFrame(0, last_stream_id=self._newest, error_code=code).serialize())

    def _calm_down(self) -> None:
        self._say_goodbye(ErrorCodes.ENHANCE_YOUR_CALM)
        self._close()

    def _close_if_done(self) -> None:
        if self._is_draining and not self._streams:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._send()
            self._heard = self.now()
            self._transport.close()
            self._forget_all()

    def _forget_all(self) -> None:
        self._is_closed = True
        for stream in tuple(self._streams.values()):
            stream.left()
        self._streams.clear()


_HANDLERS: dict[type, Callable[[Http2Connection, Any], None]] = {
    events.RequestReceived: Http2Connection._request_came,
    events.DataReceived: Http2Connection._data_came,
    events.StreamEnded: Http2Connection._request_ended,
    events.StreamReset: Http2Connection._stream_was_reset,
    events.PingReceived: Http2Connection._control_came,
    events.UnknownFrameReceived: Http2Connection._control_came,
    events.WindowUpdated: Http2Connection._window_grew,
    events.RemoteSettingsChanged: Http2Connection._settings_changed,
    events.ConnectionTerminated: Http2Connection._client_says_goodbye,
}
