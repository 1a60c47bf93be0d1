"""HTTP/2, over TLS (ALPN) or with prior knowledge: the asyncio protocol of a connection.

`data_received` hands each frame to the method in `_RECEIVERS`; `http2_frames` has the wire format and the table that
says what a frame does to its stream, `http2_headers` the header lists, and `http2_stream` a request and its response.
Every frame is counted, so that a flood of resets or of frames that do nothing ends the connection before it costs much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

from price_keeper.exchange import Header
from price_keeper.server.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW_BYTES,
    ENABLE_CONNECT_PROTOCOL,
    END_HEADERS,
    END_STREAM,
    FRAME_EFFECTS,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_BYTES,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    MAX_WINDOW_BYTES,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Effect,
    ErrorCode,
    Frame,
    FrameReader,
    ProtocolViolation,
    StreamState,
    build_frame,
    build_frame_header,
    build_goaway,
    build_headers,
    build_reset,
    build_settings,
    build_window_update,
    extract_content,
    parse_settings,
    parse_window_increment,
)
from price_keeper.server.http2_headers import (
    EMPTY_TABLE,
    HeaderDecoder,
    check_trailers,
    encode_response_head,
)
from price_keeper.server.http2_stream import STREAM_BYTES, Http2Stream
from price_keeper.server.server_limits import (
    FRAME_COST,
    HEAD_COST,
    MAX_COST_PER_TURN,
    MAX_HEAD_FRAMES,
    MAX_REMEMBERED_STREAMS,
    FixedWindowLimit,
)
from price_keeper.server.sockets import WriteStallDetector, get_peer_address

if TYPE_CHECKING:
    from price_keeper.server.listener import Listener

# Small frames, mostly window updates, that a client is expected to send; more than these count as abuse.
SMALL_FRAMES_PER_REQUEST: Final = 4  # some clients enlarge the window of each stream as they open it
SMALL_FRAMES_PER_FRAME: Final = 2  # one window update for the stream and one for the connection
BYTES_PER_WINDOW_UPDATE: Final = 1024  # some clients send a window update for each part of a frame that they have read
MAX_EXPECTED_SMALL_FRAMES: Final = 10_000  # the most that a client can accumulate
SMALL_FRAME_BYTES: Final = 64  # a data frame below this costs as much to process as one a hundred times as large
WINDOW_BYTES: Final = 1024 * 1024  # a body arrives in few round trips, and a stream buffers little unrequested data
# Frames of a discarded body that a client may have sent before it read the response: one window, in full frames.
FRAMES_PER_WINDOW: Final = WINDOW_BYTES // MAX_FRAME_BYTES
CONNECTION_WINDOW_BYTES: Final = DEFAULT_WINDOW_BYTES + 4 * WINDOW_BYTES


class Http2Connection(asyncio.Protocol):
    """One client connection: the state of its streams and windows, both ways, and the limits that all of it shares."""

    def __init__(self, listener: Listener, is_surplus: bool = False) -> None:
        self.protocol = "h2"
        self.listener = listener
        self.now = listener.now
        self.limits = limits = listener.limits
        self._is_surplus = is_surplus
        self._is_draining = False
        self._is_closed = False
        self.is_write_paused = False
        self._write_stall: WriteStallDetector | None = None  # while writing is paused or the connection closes
        self._last_activity_at = listener.now()  # of the last complete frame received, or the end of a response

        # Receiving.
        self._reader = FrameReader()
        # A header list a little over the limit gets an error response; one far beyond it ends the connection.
        self._decoder = HeaderDecoder(2 * limits.head_bytes)
        self._is_receiving = False  # frames to be sent wait until what has arrived is processed
        self._cost = 0  # of what this iteration of the event loop has processed
        self._is_yielding = False  # processing continues in the next iteration of the event loop
        self._buffered_bytes = 0  # memory reserved for a partial head and for bytes that are not processed yet
        self._head_frame: Frame | None = None  # the first of a head whose last frame has not arrived yet
        self._head_pieces: list[bytes] = []  # what its frames carried
        self._head_bytes = 0
        self._unacknowledged_bytes = 0  # data received since the client's window for the connection was enlarged
        self._resets = FixedWindowLimit(limits.stream_resets, limits.window_seconds, self.now)
        self._controls = FixedWindowLimit(limits.control_frames, limits.window_seconds, self.now)
        self._expected_small_frames = SMALL_FRAMES_PER_REQUEST

        # Streams.
        self._streams: dict[int, Http2Stream] = {}  # those that are open or half-closed
        self._closed_streams: dict[int, StreamState] = {}  # the latest that are not, oldest first
        self._highest_stream_id = 0  # that the client has opened
        self._last_stream_id = 0  # that was not refused

        # Sending.
        self._unsent: list[bytes] = []
        self._has_sent_head = False
        self._send_window = DEFAULT_WINDOW_BYTES
        self._initial_send_window = DEFAULT_WINDOW_BYTES  # of each new stream
        self._max_frame_bytes = MAX_FRAME_BYTES  # of a frame to the client
        self._grown_windows: set[int] = set()  # streams whose window the last input enlarged; 0 is the connection's

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport is no subclass, but works as one
        self._transport.set_write_buffer_limits(self.limits.write_buffer_bytes)
        self.peer = get_peer_address(transport)
        self.listener.add_connection(self, self.peer)
        settings = {
            MAX_CONCURRENT_STREAMS: self.limits.streams,
            INITIAL_WINDOW_SIZE: WINDOW_BYTES,
            MAX_HEADER_LIST_SIZE: self.limits.head_bytes,
            ENABLE_CONNECT_PROTOCOL: 0,
        }
        # Sent with the answer to the first bytes, which have arrived already.
        self._unsent.append(build_settings(settings))
        self._unsent.append(build_window_update(0, CONNECTION_WINDOW_BYTES - DEFAULT_WINDOW_BYTES))
        if self.listener.is_draining:
            self.drain()

    def connection_lost(self, _: Exception | None) -> None:
        self.listener.remove_connection(self)
        self._drop_all_streams()

    def data_received(self, data: bytes) -> None:
        """`data` begins behind the client's preface, which the protocol was detected by."""
        if self._is_closed:
            return
        self._reader.feed(data)
        if self._is_yielding:
            self._count_buffered()
        else:
            self._process_received()

    def _resume_after_yield(self) -> None:
        self._is_yielding = False
        if self._is_closed:
            return
        self._process_received()
        if not (self._is_closed or self._is_yielding):
            self._transport.resume_reading()

    def _process_received(self) -> None:
        """Processes frames up to a cost per loop iteration: many small frames or requests take long, and one connection
        must not monopolise the event loop."""
        self._release_buffered()  # from here it is counted as part of a request, or again at the end
        self._is_receiving = True
        self._cost = 0
        try:
            while not self._is_closed and (frame := self._reader.read_frame()) is not None:
                self._receive(frame)
                self._cost += len(frame.payload) + (HEAD_COST if frame.type == HEADERS else FRAME_COST)
                if self._cost > MAX_COST_PER_TURN:
                    self._yield_to_loop()
                    break
        except ProtocolViolation as violation:
            self._close_with_error(violation.code)
        finally:
            self._is_receiving = False
        if self._is_closed:
            return
        if self._cost:
            self._last_activity_at = self.now()
        if self._grown_windows:
            self._pump_grown()
        self._count_buffered()
        self.flush()
        if self._transport.get_write_buffer_size() > self.limits.control_backlog_bytes:
            self.abort()

    def _yield_to_loop(self) -> None:
        self._is_yielding = True
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume_after_yield)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def _pump_grown(self) -> None:
        grown, self._grown_windows = self._grown_windows, set()
        for stream_id in tuple(self._streams) if 0 in grown else grown:
            stream = self._streams.get(stream_id)
            if stream is not None and stream.outgoing:
                if self._send_window <= 0:
                    return
                stream.pump()

    def _count_buffered(self) -> None:
        self._release_buffered()
        size = self._reader.buffered_bytes + self._head_bytes
        if size and not self._is_closed:
            has_room = self.listener.reserve_memory(size)
            self._buffered_bytes = size
            # A head far beyond its limit, or without room in memory, gets no response. Data that is merely unread is
            # small, and a lack of room for it is reported stream by stream.
            if self._head_bytes > 2 * self.limits.head_bytes or (self._head_bytes and not has_room):
                self._close_with_error(ErrorCode.ENHANCE_YOUR_CALM)

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
            self._close_with_error(ErrorCode.NO_ERROR)

    def drain(self) -> None:
        """Sends GOAWAY, so that the client opens no more streams here, finishes the open ones, and closes."""
        self._is_draining = True
        self._unsent.append(build_goaway(self._last_stream_id, ErrorCode.NO_ERROR))
        self.flush()
        self._close_if_done()

    def abort(self) -> None:
        self._is_closed = True
        self._transport.abort()

    # Receiving. Each method returns whether the frame carried a request or a sensible part of its body.

    def _receive(self, frame: Frame) -> None:
        if self._head_frame is not None and (
            frame.type != CONTINUATION or frame.stream_id != self._head_frame.stream_id
        ):
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "nothing comes between the frames of a head")
        receive = _RECEIVERS.get(frame.type)
        if receive is not None and receive(self, frame):
            return
        # Unknown types are ignored, but a flood of them is not.
        if self._expected_small_frames:
            self._expected_small_frames -= 1
        else:
            self._require_calm(self._controls)

    def _require_calm(self, limit: FixedWindowLimit) -> None:
        if limit.is_exceeded_by_one_more():
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that do nothing")

    def _expect_small_frames(self, frames: int) -> None:
        self._expected_small_frames = min(self._expected_small_frames + frames, MAX_EXPECTED_SMALL_FRAMES)

    def _find_state(self, stream_id: int) -> StreamState:
        stream = self._streams.get(stream_id)
        if stream is not None:
            return StreamState.HALF_CLOSED if stream.is_input_finished else StreamState.OPEN
        if stream_id > self._highest_stream_id or not stream_id % 2:
            return StreamState.IDLE
        return self._closed_streams.get(stream_id, StreamState.FORGOTTEN)

    def _may_apply(self, frame: Frame) -> bool:
        """Whether the frame may be interpreted in its stream's state; carries out what it does otherwise."""
        effect = FRAME_EFFECTS[self._find_state(frame.stream_id)][frame.type]
        if effect is Effect.STREAM_CLOSED:
            self._reset_for_error(frame.stream_id, ErrorCode.STREAM_CLOSED)
        elif effect is Effect.CONNECTION_STREAM_CLOSED:
            raise ProtocolViolation(ErrorCode.STREAM_CLOSED, "the stream has ended")
        elif effect is Effect.CONNECTION_PROTOCOL_ERROR:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "the frame's stream was never opened")
        return effect is Effect.APPLY

    def _reset_for_error(self, stream_id: int, code: ErrorCode) -> None:
        """Resets a stream for a mistake of the client. It counts as if the client itself had reset the stream: else it
        could have requests begun and abandoned without end."""
        self._unsent.append(build_reset(stream_id, code))
        self._drop_stream(stream_id)

    def _drop_stream(self, stream_id: int) -> None:
        """Ends a stream that either side has reset, and the request on it. A closed stream stays as it is."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close_stream(stream_id, StreamState.RESET)
            stream.on_disconnected()
            self._require_calm(self._resets)
            self._close_if_done()

    def _receive_headers(self, frame: Frame) -> bool:
        self._head_pieces.append(extract_content(frame))
        return self._receive_head_piece(frame, frame)

    def _receive_continuation(self, frame: Frame) -> bool:
        if self._head_frame is None:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a continuation continues a head")
        self._head_pieces.append(frame.payload)
        return self._receive_head_piece(self._head_frame, frame)

    def _receive_head_piece(self, first: Frame, frame: Frame) -> bool:
        if not frame.flags & END_HEADERS:
            if len(self._head_pieces) > MAX_HEAD_FRAMES:
                raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"a head has at most {MAX_HEAD_FRAMES} frames")
            self._head_frame = first._replace(payload=b"")  # it is in the pieces
            self._head_bytes += len(self._head_pieces[-1])
            return True
        block = b"".join(self._head_pieces)
        self._head_frame, self._head_pieces, self._head_bytes = None, [], 0
        return self._receive_head(first, block)

    def _receive_head(self, frame: Frame, block: bytes) -> bool:
        """`frame` is the first of the head, `block` the header block of all its frames."""
        stream_id = frame.stream_id
        headers = self._decoder.decode(block)  # in any case, or the table would not be the client's any more
        self._cost += self._decoder.list_bytes  # one byte of the block may stand for kilobytes of the list
        is_last = bool(frame.flags & END_STREAM)
        if not self._may_apply(frame):
            return False
        stream = self._streams.get(stream_id)
        if stream is None:
            self._open_stream(stream_id, headers, is_last)
            return True
        check_trailers(headers)
        if not is_last:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "trailers end their stream")
        stream.end_request()
        return True

    def _open_stream(self, stream_id: int, headers: Sequence[Header], is_last: bool) -> None:
        if not stream_id % 2:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a client's streams have odd ids")
        if len(self._streams) >= self.limits.streams:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"a client has at most {self.limits.streams} streams")
        self._highest_stream_id = stream_id
        if self._is_draining:
            self._unsent.append(build_reset(stream_id, ErrorCode.REFUSED_STREAM))
            self._close_stream(stream_id, StreamState.RESET)
            self._require_calm(self._resets)
            return
        self._last_stream_id = stream_id
        self._expect_small_frames(SMALL_FRAMES_PER_REQUEST)
        is_room = self.listener.reserve_memory(STREAM_BYTES)
        stream = Http2Stream(stream_id, self, self._initial_send_window, is_input_finished=is_last)
        self._streams[stream_id] = stream
        if self._is_surplus:
            stream.refuse(self.listener.too_many_connections)
            self.drain()
        else:
            stream.take_head(headers)
        if stream_id not in self._streams:
            return
        if not is_room:  # a response would wait for a window that may never open
            self.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
            stream.on_disconnected()  # releases the memory of its head
        elif is_last:
            stream.end_request()

    def _receive_data(self, frame: Frame) -> bool:
        stream_id = frame.stream_id
        data = extract_content(frame)
        is_last = bool(frame.flags & END_STREAM)
        self._acknowledge_data(len(frame.payload))
        if not self._may_apply(frame):
            return False
        stream = self._streams[stream_id]
        stream.is_input_finished = is_last
        if not is_last:
            self._acknowledge_stream_data(stream, len(frame.payload))
        if data:
            stream.take_data(data)
        if is_last and stream_id in self._streams:
            stream.end_request()
        return is_last or len(data) >= SMALL_FRAME_BYTES

    # What has arrived is part of the memory of requests, whatever becomes of it. So it is acknowledged at once, by half
    # windows, and a client that overruns its window gains nothing.

    def _acknowledge_data(self, size: int) -> None:
        self._unacknowledged_bytes += size
        if self._unacknowledged_bytes >= CONNECTION_WINDOW_BYTES // 2:
            self._unsent.append(build_window_update(0, self._unacknowledged_bytes))
            self._unacknowledged_bytes = 0

    def _acknowledge_stream_data(self, stream: Http2Stream, size: int) -> None:
        stream.unacknowledged_bytes += size
        if stream.unacknowledged_bytes >= WINDOW_BYTES // 2:
            self._unsent.append(build_window_update(stream.id, stream.unacknowledged_bytes))
            stream.unacknowledged_bytes = 0

    def _receive_reset(self, frame: Frame) -> bool:
        if not self._may_apply(frame):
            return False
        self._drop_stream(frame.stream_id)
        return True  # counted already

    def _receive_priority(self, _: Frame) -> bool:
        return False  # RFC 9113 has deprecated it

    def _receive_settings(self, frame: Frame) -> bool:
        settings = parse_settings(frame)
        if frame.flags & ACK:
            return False
        self._max_frame_bytes = settings.get(MAX_FRAME_SIZE, self._max_frame_bytes)
        initial = settings.get(INITIAL_WINDOW_SIZE, self._initial_send_window)
        grown, self._initial_send_window = initial - self._initial_send_window, initial
        if grown:
            for stream in self._streams.values():
                stream.send_window += grown
                if stream.send_window > MAX_WINDOW_BYTES:
                    raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "a window has less than 2 GB")
        self._grown_windows.add(0)
        self._unsent.append(build_frame(SETTINGS, ACK, 0))
        return False

    def _receive_push_promise(self, _: Frame) -> bool:
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a client pushes nothing")

    def _receive_ping(self, frame: Frame) -> bool:
        if not frame.flags & ACK:
            self._unsent.append(build_frame(PING, ACK, 0, frame.payload))
        return False

    def _receive_goaway(self, _: Frame) -> bool:
        """A client that will open no more streams still waits for the responses to its active ones."""
        self._is_draining = True
        self._close_if_done()
        return False

    def _receive_window_update(self, frame: Frame) -> bool:
        increment = parse_window_increment(frame)
        stream_id = frame.stream_id
        if not stream_id:
            self._send_window += increment
            if self._send_window > MAX_WINDOW_BYTES:
                raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "a window has less than 2 GB")
        elif self._may_apply(frame):
            stream = self._streams[stream_id]
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW_BYTES:
                self._reset_for_error(stream_id, ErrorCode.FLOW_CONTROL_ERROR)
                return True  # counted already
        self._grown_windows.add(stream_id)
        return False

    # Called by streams.

    def send_head(self, stream: Http2Stream, status: int, headers: Sequence[Header], length: int | None) -> None:
        block = encode_response_head(status, headers, length)
        if not self._has_sent_head:
            self._has_sent_head = True
            block = EMPTY_TABLE + block
        self._unsent.append(build_headers(stream.id, block, self._max_frame_bytes))

    def send_outgoing(self, stream: Http2Stream) -> None:
        """Sends as much of the stream's queued data as the client's windows and the transport allow, and ends the
        stream when all of a finished response is sent."""
        unwritten = 0
        while stream.outgoing and not self.is_write_paused:
            window_bytes = min(self._send_window, stream.send_window, self._max_frame_bytes)
            if window_bytes <= 0:
                return
            data = stream.take_outgoing(window_bytes)
            size = len(data)
            self._send_window -= size
            stream.send_window -= size
            self._expect_small_frames(SMALL_FRAMES_PER_FRAME + size // BYTES_PER_WINDOW_UPDATE)
            is_last = stream.is_finished and not stream.outgoing
            self._unsent += (build_frame_header(DATA, END_STREAM if is_last else 0, stream.id, size), data)
            if is_last:
                self._end_stream(stream)
                return
            unwritten += size
            if unwritten > self.limits.write_buffer_bytes:
                self._write_unsent()
                unwritten = 0
        if stream.is_finished and not stream.outgoing:
            self._unsent.append(build_frame(DATA, END_STREAM, stream.id))
            self._end_stream(stream)

    def reset(self, stream: Http2Stream, code: ErrorCode) -> None:
        if not stream.is_input_finished:
            self._expect_small_frames(FRAMES_PER_WINDOW)
        self._unsent.append(build_reset(stream.id, code))
        self._remove_stream(stream, StreamState.RESET)

    def flush(self) -> None:
        if not self._is_receiving:
            self._write_unsent()

    # Sending and closing.

    def _end_stream(self, stream: Http2Stream) -> None:
        if stream.is_input_finished:
            self._remove_stream(stream, StreamState.ENDED)
        else:
            self.reset(stream, ErrorCode.NO_ERROR)  # the client need not send the rest

    def _remove_stream(self, stream: Http2Stream, state: StreamState) -> None:
        self._close_stream(stream.id, state)
        self._last_activity_at = self.now()
        self.flush()
        self._close_if_done()

    def _close_stream(self, stream_id: int, state: StreamState) -> Http2Stream | None:
        self._closed_streams[stream_id] = state
        if len(self._closed_streams) > MAX_REMEMBERED_STREAMS:
            del self._closed_streams[next(iter(self._closed_streams))]
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self.listener.release_memory(STREAM_BYTES)
        return stream

    def _write_unsent(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            if not self._is_closed:
                self._transport.write(b"".join(unsent))

    def _close_with_error(self, code: ErrorCode) -> None:
        self._unsent.append(build_goaway(self._last_stream_id, code))
        self._close()

    def _close_if_done(self) -> None:
        if self._is_draining and not self._streams:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._write_unsent()
            self._write_stall = WriteStallDetector(self._transport, self.now())
            self._transport.close()
            self._drop_all_streams()

    def _drop_all_streams(self) -> None:
        self._is_closed = True
        self._release_buffered()
        self._reader = FrameReader()
        self._head_pieces = []
        for stream_id in tuple(self._streams):
            stream = self._close_stream(stream_id, StreamState.RESET)
            if stream is not None:
                stream.on_disconnected()


_RECEIVERS: Final[dict[int, Callable[[Http2Connection, Frame], bool]]] = {
    DATA: Http2Connection._receive_data,
    HEADERS: Http2Connection._receive_headers,
    PRIORITY: Http2Connection._receive_priority,
    RST_STREAM: Http2Connection._receive_reset,
    SETTINGS: Http2Connection._receive_settings,
    PUSH_PROMISE: Http2Connection._receive_push_promise,
    PING: Http2Connection._receive_ping,
    GOAWAY: Http2Connection._receive_goaway,
    WINDOW_UPDATE: Http2Connection._receive_window_update,
    CONTINUATION: Http2Connection._receive_continuation,
}
