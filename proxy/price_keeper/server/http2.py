"""HTTP/2 with prior knowledge: the asyncio protocol of a connection, over the library h2.

`CountingH2Connection` counts frames one by one as they are decoded, so that a flood of resets or control frames ends
the connection before it costs much. `Http2Connection` maps h2's events to streams (`http2_stream`); start there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import DenialOfServiceError, H2Error, NoSuchStreamError, StreamIDTooLowError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, SettingsFrame

from price_keeper.exchange import Header
from price_keeper.server.http2_stream import STREAM_BYTES, Http2Stream
from price_keeper.server.server_limits import MAX_SLICES_PER_TURN, SLICE_BYTES, FixedWindowLimit, ServerLimits
from price_keeper.server.sockets import WriteStallDetector, get_peer_address

if TYPE_CHECKING:
    from price_keeper.server.listener import Listener

HEADER_TABLE_BYTES = 4096  # HPACK table for sent headers, the protocol's default; h2 searches a table linearly

# Small frames, mostly window updates, that a client is expected to send; more than these count as abuse.
SMALL_FRAMES_PER_REQUEST = 4  # some clients enlarge the window of each stream as they open it
SMALL_FRAMES_PER_FRAME = 2  # one window update for the stream and one for the connection
BYTES_PER_WINDOW_UPDATE = 1024  # some clients send a window update for each part of a frame that they have read
MAX_EXPECTED_SMALL_FRAMES = 10_000  # the most that a client can accumulate
SMALL_FRAME_BYTES = 64  # a data frame below this costs as much to process as one a hundred times as large
FRAME_HEADER_BYTES = 9
WINDOW_BYTES = 1024 * 1024  # a body arrives in few round trips, and a stream buffers little unrequested data

_log = logging.getLogger("price_keeper.surface")


class FrameReader(FrameBuffer):
    """Checks a frame's length as soon as its header has arrived; h2 first buffers the whole frame, up to 16 MB."""

    def __next__(self) -> Frame:
        if len(self._data) >= FRAME_HEADER_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:3]))
        return super().__next__()

    @property
    def header_block_bytes(self) -> int:
        """Bytes received of a header block whose last frame has not arrived yet."""
        return sum(len(frame.data) for frame in self._headers_buffer)

    @property
    def buffered_bytes(self) -> int:
        return len(self._data) + self.header_block_bytes


class CountingH2Connection(H2Connection):
    """h2's connection, with limits on stream resets and on frames that do nothing useful. Raises DenialOfServiceError
    from `receive_data` when one is exceeded."""

    MAX_CLOSED_STREAMS = 1024  # closed streams that h2 remembers; its default of 65,536 takes 8 MB per connection

    def __init__(self, limits: ServerLimits, now: Callable[[], float]) -> None:
        super().__init__(H2Configuration(client_side=False, header_encoding=None))
        self.received = self.incoming_buffer = FrameReader(server=True)
        self._resets = FixedWindowLimit(limits.stream_resets, limits.window_seconds, now)
        self._controls = FixedWindowLimit(limits.control_frames, limits.window_seconds, now)
        self._expected_small_frames = SMALL_FRAMES_PER_REQUEST

    def expect_frames_for_request(self) -> None:
        self._expect_small_frames(SMALL_FRAMES_PER_REQUEST)

    def expect_frames_for_data(self, size: int) -> None:
        """Raises the number of small frames that the client may send, for `size` bytes of a response sent to it."""
        self._expect_small_frames(SMALL_FRAMES_PER_FRAME + size // BYTES_PER_WINDOW_UPDATE)

    def _expect_small_frames(self, frames: int) -> None:
        self._expected_small_frames = min(self._expected_small_frames + frames, MAX_EXPECTED_SMALL_FRAMES)

    def _receive_frame(self, frame: Frame) -> list[events.Event]:
        received_events = super()._receive_frame(frame)
        if any(type(event) is events.StreamReset for event in received_events):
            self._require_calm(not self._resets.is_exceeded_by_one_more())
        elif not _is_useful(frame, received_events):
            if self._expected_small_frames:
                self._expected_small_frames -= 1
            else:
                self._require_calm(not self._controls.is_exceeded_by_one_more())
        return received_events

    @staticmethod
    def _require_calm(is_calm: bool) -> None:
        """Stops processing, in the middle of the received data, with an error code that the client sees."""
        if not is_calm:
            raise DenialOfServiceError("too many frames that do nothing")

    def _receive_goaway_frame(self, _: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        # A client that will open no more streams still waits for the responses to its active ones.
        return [], [events.ConnectionTerminated()]

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[events.Event]]:
        if SettingCodes.HEADER_TABLE_SIZE in frame.settings:
            requested = frame.settings[SettingCodes.HEADER_TABLE_SIZE]
            frame.settings[SettingCodes.HEADER_TABLE_SIZE] = min(requested, HEADER_TABLE_BYTES)
        return super()._receive_settings_frame(frame)

    def detach(self) -> None:
        """Called when the connection ends. Breaks the reference cycle through h2's table of frame handlers: the garbage
        collector runs seldom, so it would hold memory for long."""
        self._frame_dispatch_table.clear()


def _is_useful(frame: Frame, received_events: list[events.Event]) -> bool:
    """Whether a frame carries a request or a sensible part of its body. Headers without an event belong to a stream
    that is closed already."""
    if isinstance(frame, DataFrame):
        return len(frame.data) >= SMALL_FRAME_BYTES or any(
            type(event) is events.StreamEnded for event in received_events
        )
    return isinstance(frame, HeadersFrame) and bool(received_events)


class Http2Connection(asyncio.Protocol):
    """One client connection: maps h2's events to streams, sends their data within the client's windows, and counts the
    memory of incomplete frames."""

    def __init__(self, listener: Listener, is_surplus: bool = False) -> None:
        self.protocol = "h2"
        self.listener = listener
        self.now = listener.now
        self.limits = limits = listener.limits
        self._is_surplus = is_surplus
        self._h2 = CountingH2Connection(limits, self.now)
        self._streams: dict[int, Http2Stream] = {}
        self._last_stream_id = 0
        self._is_draining = False
        self._is_closed = False
        self.is_write_paused = False
        self._last_activity_at = listener.now()  # of the last complete frame received, or the end of a response
        self._unread = b""  # received, and left for a later iteration of the event loop
        self._is_yielding = False  # parsing continues in the next iteration of the event loop
        self._buffered_bytes = 0  # memory reserved for a partial head, a partial frame and `_unread`
        self._grown_windows: set[int] = set()  # streams whose window the last input enlarged; 0 is the connection's
        self._write_stall: WriteStallDetector | None = None  # while writing is paused or the connection closes

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass, but works as one
        self._transport.set_write_buffer_limits(self.limits.write_buffer_bytes)
        self.peer = get_peer_address(transport)
        self.listener.add_connection(self, self.peer)
        # Set as initial values so that they hold at once: if the client had to acknowledge them first, the two sides
        # would count windows differently until then.
        self._h2.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.limits.head_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        # A header list a little over the limit gets an error response; one far beyond it ends the connection.
        self._h2.decoder.max_header_list_size = 2 * self.limits.head_bytes
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW_BYTES * 4)
        self._send()
        if self.listener.is_draining:
            self.drain()

    def connection_lost(self, _: Exception | None) -> None:
        self.listener.remove_connection(self)
        self._drop_all_streams()
        self._h2.detach()

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        if len(data) <= SLICE_BYTES and not self._unread:
            self._receive(data)
            return
        self._unread += data
        if not self._is_yielding:
            self._feed_unread()

    def _feed_unread(self) -> None:
        """Processes a few slices per loop iteration: many small frames take long, and one connection must not
        monopolise the event loop."""
        for _ in range(MAX_SLICES_PER_TURN):
            piece, self._unread = self._unread[:SLICE_BYTES], self._unread[SLICE_BYTES:]
            self._receive(piece)
            if not self._unread or self._is_closed:
                return
        self._is_yielding = True
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume_after_yield)

    def _resume_after_yield(self) -> None:
        self._is_yielding = False
        if self._is_closed:
            return
        self._feed_unread()
        if not (self._is_closed or self._is_yielding):
            self._transport.resume_reading()

    def _receive(self, data: bytes) -> None:
        self._release_buffered()  # from here it is counted as part of a request, or again at the end
        try:
            received_events = self._h2.receive_data(data)
            for event in received_events:
                handle = _HANDLERS.get(type(event))
                if handle is not None and not self._is_closed:
                    handle(self, event)
        except H2Error:
            self._close()  # h2 has queued a GOAWAY frame with the reason
            return
        if self._is_closed:
            return
        if received_events:
            self._last_activity_at = self.now()
        if self._grown_windows:
            self._pump_grown()
        self._count_buffered()
        self._send()
        if self._transport.get_write_buffer_size() > self.limits.control_backlog_bytes:
            self.abort()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def _pump_grown(self) -> None:
        grown, self._grown_windows = self._grown_windows, set()
        numbers = tuple(self._streams) if 0 in grown else grown
        for number in numbers:
            stream = self._streams.get(number)
            if stream is not None and stream.outgoing:
                if self._h2.outbound_flow_control_window <= 0:
                    return
                stream.pump()

    def _count_buffered(self) -> None:
        received = self._h2.received
        partial_head = received.header_block_bytes
        size = received.buffered_bytes + len(self._unread)
        if size and not self._is_closed:
            has_room = self.listener.reserve_memory(size)
            self._buffered_bytes = size
            # A head far beyond its limit, or without room in memory, gets no response. Data that is merely unread is
            # small, and a lack of room for it is reported stream by stream.
            if partial_head > 2 * self.limits.head_bytes or (partial_head and not has_room):
                self._close_for_abuse()

    def _release_buffered(self) -> None:
        if self._buffered_bytes:
            self.listener.release_memory(self._buffered_bytes)
            self._buffered_bytes = 0

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._write_stall = WriteStallDetector(self._transport, self.now())
        for stream in self._streams.values():
            stream.pause()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if not self._is_closed:
            self._write_stall = None
        for stream in tuple(self._streams.values()):
            stream.pump()

    def check_timeouts(self, now: float) -> None:
        stalled = self._write_stall.measure_stall(now) if self._write_stall is not None else 0.0
        if self._is_closed:
            if stalled > self.limits.lingering_seconds:
                self._transport.abort()
            return
        # While the connection itself is stalled, no stream can be blamed for waiting.
        connection_stalled = stalled if self.is_write_paused else None
        for stream in tuple(self._streams.values()):
            stream.check_timeouts(now, connection_stalled)
        if self.is_write_paused:
            if stalled > self.limits.stalled_seconds:
                self.abort()
        elif not self._streams and now - self._last_activity_at > self.limits.idle_seconds:
            self._send_goaway(ErrorCodes.NO_ERROR)
            self._close()

    def drain(self) -> None:
        """Sends GOAWAY, so that the client opens no more streams here, finishes the open ones, and closes."""
        self._is_draining = True
        self._send_goaway(ErrorCodes.NO_ERROR)
        self._close_if_done()

    def abort(self) -> None:
        self._is_closed = True
        self._transport.abort()

    # Handlers of h2's events.

    def _on_request(self, event: events.RequestReceived) -> None:
        if self._is_draining:
            self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last_stream_id = event.stream_id
        self._h2.expect_frames_for_request()
        is_room = self.listener.reserve_memory(STREAM_BYTES)
        stream = Http2Stream(event.stream_id, self, is_input_finished=event.stream_ended is not None)
        self._streams[event.stream_id] = stream
        if self._is_surplus:
            stream.refuse(self.listener.too_many_connections)
            self.drain()
        else:
            stream.take_head(event.headers or [])
        if not is_room and event.stream_id in self._streams:  # a response would wait for a window that may never open
            self.reset(stream, ErrorCodes.ENHANCE_YOUR_CALM)
            stream.on_disconnected()  # releases the memory of its head

    def _on_data(self, event: events.DataReceived) -> None:
        if event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        stream = self._streams.get(event.stream_id)
        if stream is not None and (event.data or event.stream_ended is not None):
            stream.is_input_finished = event.stream_ended is not None
            stream.take_data(event.data or b"")

    def _on_request_end(self, event: events.StreamEnded) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is not None:
            stream.end_request()

    def _on_stream_reset(self, event: events.StreamReset) -> None:
        stream = self._pop_stream(event.stream_id)
        if stream is not None:
            stream.on_disconnected()
        self._close_if_done()

    def _on_window_update(self, event: events.WindowUpdated) -> None:
        self._grown_windows.add(event.stream_id or 0)

    def _on_settings(self, _: events.RemoteSettingsChanged) -> None:
        self._grown_windows.add(0)

    def _on_goaway(self, _: events.ConnectionTerminated) -> None:
        self._is_draining = True
        self._close_if_done()

    # Called by streams.

    def send_head(self, stream: Http2Stream, headers: Sequence[Header]) -> None:
        try:
            self._h2.send_headers(stream.id, headers)
        except (NoSuchStreamError, StreamIDTooLowError):  # the latter if the client has opened another stream since
            self._on_stream_lost(stream)
        except H2Error as failure:
            _log.error("head of an HTTP/2 response cannot be sent (%s); its stream is reset", failure)
            stream.abort()

    def send_outgoing(self, stream: Http2Stream) -> None:
        """Sends as much of the stream's queued data as the client's windows and the transport allow, and ends the
        stream when all of a finished response is sent."""
        unsent = 0
        try:
            while stream.outgoing and not self.is_write_paused:
                window_bytes = min(self._h2.local_flow_control_window(stream.id), self._h2.max_outbound_frame_size)
                if window_bytes <= 0:
                    return
                data = stream.take_outgoing(window_bytes)
                self._h2.send_data(stream.id, data)
                self._h2.expect_frames_for_data(len(data))
                unsent += len(data)
                if unsent > self.limits.write_buffer_bytes:
                    self._send()
                    unsent = 0
            if stream.is_finished and not stream.outgoing:
                self._h2.end_stream(stream.id)
                if not stream.is_input_finished:
                    self._reset(stream.id, ErrorCodes.NO_ERROR)  # the client need not send the rest
                self.remove_stream(stream)
        except NoSuchStreamError:
            self._on_stream_lost(stream)

    def reset(self, stream: Http2Stream, code: ErrorCodes) -> None:
        self._reset(stream.id, code)
        self.remove_stream(stream)

    def remove_stream(self, stream: Http2Stream) -> None:
        self._pop_stream(stream.id)
        self._last_activity_at = self.now()
        self._send()
        self._close_if_done()

    def flush(self) -> None:
        self._send()

    # Sending and closing.

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        if not self._is_closed:
            try:
                self._h2.reset_stream(stream_id, code)
            except NoSuchStreamError:
                return
            self._send()

    def _on_stream_lost(self, stream: Http2Stream) -> None:
        """The client has reset the stream: h2 knows already, and its event follows."""
        self._pop_stream(stream.id)
        stream.on_disconnected()

    def _pop_stream(self, stream_id: int) -> Http2Stream | None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self.listener.release_memory(STREAM_BYTES)
        return stream

    def _send(self) -> None:
        if not self._is_closed and (data := self._h2.data_to_send()):
            self._transport.write(data)

    def _send_goaway(self, code: ErrorCodes) -> None:
        # Written past h2, which would treat the connection as closed; open streams must still get their responses.
        self._send()
        if not self._is_closed:
            self._transport.write(GoAwayFrame(0, last_stream_id=self._last_stream_id, error_code=code).serialize())

    def _close_for_abuse(self) -> None:
        self._send_goaway(ErrorCodes.ENHANCE_YOUR_CALM)
        self._close()

    def _close_if_done(self) -> None:
        if self._is_draining and not self._streams:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._send()
            self._write_stall = WriteStallDetector(self._transport, self.now())
            self._transport.close()
            self._drop_all_streams()

    def _drop_all_streams(self) -> None:
        self._is_closed = True
        self._release_buffered()
        self._unread = b""
        for number in tuple(self._streams):
            if (stream := self._pop_stream(number)) is not None:
                stream.on_disconnected()


_HANDLERS: dict[type, Callable[[Http2Connection, Any], None]] = {
    events.RequestReceived: Http2Connection._on_request,
    events.DataReceived: Http2Connection._on_data,
    events.StreamEnded: Http2Connection._on_request_end,
    events.StreamReset: Http2Connection._on_stream_reset,
    events.WindowUpdated: Http2Connection._on_window_update,
    events.RemoteSettingsChanged: Http2Connection._on_settings,
    events.ConnectionTerminated: Http2Connection._on_goaway,
}
