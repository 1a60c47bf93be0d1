"""HTTP/2 with prior knowledge on the data port: the library `h2` keeps the protocol, this file the streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import H2Error
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame

from proxy.exchange import Header
from proxy.surface.http2_stream import Stream

if TYPE_CHECKING:
    from proxy.surface.listener import Listener

WINDOW_BYTES = 1024 * 1024  # a body comes in few round trips, and a stream holds little that was not asked for
CONTROL_BACKLOG_BYTES = 1024 * 1024  # answers to pings and settings that the client does not read: an attack


class Http2Connection(asyncio.Protocol):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.now = listener.now
        self.limits = listener.limits
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self._streams: dict[int, Stream] = {}
        self._resets: deque[float] = deque()
        self._newest = 0
        self._is_draining = False
        self._is_closed = False
        self.is_write_paused = False
        self._since = listener.now()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class
        self._transport.set_write_buffer_limits(self.limits.write_buffer_bytes)
        self._listener.joined(self)
        self._h2.local_settings.update(
            {
                SettingCodes.MAX_CONCURRENT_STREAMS: self.limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.limits.head_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            }
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES * 4)
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        self._is_closed = True
        self._listener.left(self)
        for stream in tuple(self._streams.values()):
            stream.left()
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        self._since = self._listener.now()
        try:
            for event in self._h2.receive_data(data):
                handle = _HANDLERS.get(type(event))
                if handle is not None:
                    handle(self, event)
        except H2Error:
            self._fail()
            return
        if not self._is_closed:
            self._send()
            if self._transport.get_write_buffer_size() > CONTROL_BACKLOG_BYTES:
                self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._since = self._listener.now()
        for stream in self._streams.values():
            stream.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        for stream in tuple(self._streams.values()):
            stream.pump()

    def check_time(self, now: float) -> None:
        for stream in tuple(self._streams.values()):
            stream.check_time(now)
        waited = now - self._since
        if self.is_write_paused and waited > self.limits.stalled_seconds:
            self._transport.abort()
        elif not self._streams and waited > self.limits.idle_seconds:
            self._say_goodbye(ErrorCodes.NO_ERROR)
            self._transport.close()

    def drain(self) -> None:
        """Tells the client to go elsewhere with what it has not sent yet, and finishes the rest."""
        self._is_draining = True
        self._say_goodbye(ErrorCodes.NO_ERROR)
        self._close_if_done()

    def cut(self) -> None:
        self._transport.abort()

    # What the client did.

    def _request_came(self, event: events.RequestReceived) -> None:
        if self._is_draining:
            self._h2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._newest = max(self._newest, event.stream_id)
        stream = Stream(event.stream_id, self, self._listener.now())
        self._streams[event.stream_id] = stream
        stream.take_head(event.headers or [])

    def _data_came(self, event: events.DataReceived) -> None:
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.take_data(event.data or b"")

    def _request_ended(self, event: events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.request_ended(self._listener)

    def _stream_was_reset(self, event: events.StreamReset) -> None:
        stream = self._streams.pop(event.stream_id, None)
        if stream is not None:
            stream.left()
        now = self._listener.now()
        self._resets.append(now)
        while now - self._resets[0] > self.limits.reset_window_seconds:
            self._resets.popleft()
        if len(self._resets) > self.limits.resets:
            self._say_goodbye(ErrorCodes.ENHANCE_YOUR_CALM)
            self._transport.abort()
        self._close_if_done()

    def _window_grew(self, event: events.WindowUpdated) -> None:
        if event.stream_id:
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.pump()
            return
        for stream in tuple(self._streams.values()):
            stream.pump()

    def _settings_changed(self, _: events.RemoteSettingsChanged) -> None:
        for stream in tuple(self._streams.values()):
            stream.pump()

    def _client_says_goodbye(self, _: events.ConnectionTerminated) -> None:
        if not self._streams:
            self._transport.close()

    # What streams call.

    def send_head(self, stream: Stream, headers: Sequence[Header]) -> None:
        self._h2.send_headers(stream.id, headers)

    def send_some(self, stream: Stream) -> None:
        """As much of what waits as the client's windows take."""
        while stream.outgoing and not self.is_write_paused:
            room = min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            self._h2.send_data(stream.id, stream.take_outgoing(room))
        if stream.is_finished and not stream.outgoing:
            self._h2.end_stream(stream.id)
            self.forget(stream)

    def reset(self, stream: Stream, code: ErrorCodes) -> None:
        if not self._is_closed:
            self._h2.reset_stream(stream.id, code)
            self._send()
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        self._streams.pop(stream.id, None)
        self._since = self._listener.now()
        self._send()
        self._close_if_done()

    def flush(self) -> None:
        self._send()

    # What goes out.

    def _send(self) -> None:
        if not self._is_closed and (data := self._h2.data_to_send()):
            self._transport.write(data)

    def _say_goodbye(self, code: ErrorCodes) -> None:
        # The library would take the connection for closed; streams under way must still be answered.
        frame = GoAwayFrame(0, last_stream_id=self._newest, error_code=code)
        if not self._is_closed:
            self._transport.write(frame.serialize())

    def _close_if_done(self) -> None:
        if self._is_draining and not self._streams and not self._is_closed:
            self._transport.close()

    def _fail(self) -> None:
        """The client broke the protocol; the library has put why into what is to be sent."""
        self._send()
        self._transport.close()
        self._is_closed = True
        for stream in tuple(self._streams.values()):
            stream.left()
        self._streams.clear()


_HANDLERS: dict[type, Callable[[Http2Connection, Any], None]] = {
    events.RequestReceived: Http2Connection._request_came,
    events.DataReceived: Http2Connection._data_came,
    events.StreamEnded: Http2Connection._request_ended,
    events.StreamReset: Http2Connection._stream_was_reset,
    events.WindowUpdated: Http2Connection._window_grew,
    events.RemoteSettingsChanged: Http2Connection._settings_changed,
    events.ConnectionTerminated: Http2Connection._client_says_goodbye,
}
