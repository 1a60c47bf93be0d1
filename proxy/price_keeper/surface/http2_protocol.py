"""The protocol of one HTTP/2 connection: the library `h2`, but for what it makes of some frames, and with each counted.

Thousands of frames may come at once, and nobody else is served before all of them are taken apart. So they are counted
one by one, before anybody hears of what they say.
"""

from __future__ import annotations

from collections.abc import Callable

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import DenialOfServiceError
from h2.frame_buffer import FrameBuffer
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, SettingsFrame

from price_keeper.server.server_limits import FixedWindowLimit, ServerLimits

HEADER_TABLE_BYTES = 4096  # of our headers' compression, the protocol's default; the library searches it line by line

# Of small frames, window updates most of all, so many are to be expected; the rest are frames that ask for nothing.
SMALL_FRAMES_PER_REQUEST = 4  # some clients widen the windows of each stream as they open it
SMALL_FRAMES_PER_FRAME = 2  # window updates for its stream and for the connection
BYTES_PER_WINDOW_UPDATE = 1024  # of a frame, for clients that tell of each part of it that they have read
MAX_EXPECTED_SMALL_FRAMES = 10_000  # that can be saved up
SMALL_FRAME_BYTES = 64  # of a body, in one frame: to take that apart costs what a hundred times as much would
FRAME_HEADER_BYTES = 9


class FrameReader(FrameBuffer):
    """Checks a frame's length as soon as its header is here; the library waits for all of it first, up to 16 MB."""

    def __next__(self) -> Frame:
        if len(self._data) >= FRAME_HEADER_BYTES:
            self._validate_frame_length(int.from_bytes(self._data[:3]))
        return super().__next__()

    @property
    def header_block_bytes(self) -> int:
        """Received of a header block whose last frame is not here yet."""
        return sum(len(frame.data) for frame in self._headers_buffer)

    @property
    def buffered_bytes(self) -> int:
        return len(self._data) + self.header_block_bytes


class CountingH2Connection(H2Connection):
    MAX_CLOSED_STREAMS = 1024  # remembered of one connection; the library's 65,536 take 8 MB

    def __init__(self, limits: ServerLimits, now: Callable[[], float]) -> None:
        super().__init__(H2Configuration(client_side=False, header_encoding=None))
        self.received = self.incoming_buffer = FrameReader(server=True)
        self._resets = FixedWindowLimit(limits.stream_resets, limits.window_seconds, now)
        self._controls = FixedWindowLimit(limits.control_frames, limits.window_seconds, now)
        self._expected_small_frames = SMALL_FRAMES_PER_REQUEST

    def expect_frames_for_request(self) -> None:
        self._expect_small_frames(SMALL_FRAMES_PER_REQUEST)

    def expect_frames_for_data(self, size: int) -> None:
        """Of an answer."""
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
        """Ends the connection in the middle of what has come, and says why."""
        if not is_calm:
            raise DenialOfServiceError("so many frames that ask for nothing are an attack")

    def _receive_goaway_frame(self, _: GoAwayFrame) -> tuple[list[Frame], list[events.Event]]:
        # A client that opens no more streams still waits for the answers under way.
        return [], [events.ConnectionTerminated()]

    def _receive_settings_frame(self, frame: SettingsFrame) -> tuple[list[Frame], list[events.Event]]:
        if SettingCodes.HEADER_TABLE_SIZE in frame.settings:
            requested = frame.settings[SettingCodes.HEADER_TABLE_SIZE]
            frame.settings[SettingCodes.HEADER_TABLE_SIZE] = min(requested, HEADER_TABLE_BYTES)
        return super()._receive_settings_frame(frame)

    def detach(self) -> None:
        """At the connection's end. What frames are received by leads back here, so that only the collector of cycles
        would end it, which comes by seldom."""
        self._frame_dispatch_table.clear()


def _is_useful(frame: Frame, received_events: list[events.Event]) -> bool:
    """Of what nobody has a use for, some is to be expected. Without an event it was for a stream that is no more."""
    if isinstance(frame, DataFrame):
        return len(frame.data) >= SMALL_FRAME_BYTES or any(
            type(event) is events.StreamEnded for event in received_events
        )
    return isinstance(frame, HeadersFrame) and bool(received_events)
