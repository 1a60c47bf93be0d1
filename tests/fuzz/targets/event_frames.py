"""Event streams: the watcher against botocore's own parser; frames made right by their CRCs, or bytes as they come."""

from __future__ import annotations

import struct
from binascii import crc32
from typing import Any

from botocore.eventstream import EventStreamBuffer, ParserError
from price_keeper.operations import Operation
from price_keeper.upstream.eventstream import MAX_EXCEPTION_PAYLOAD, EventFrame, FrameWatcher, encode_frame
from price_keeper.usage.usage_reader import build_reader

from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader, pieces

WANTED = {"metadata": 64, "chunk": 20, "nothing": 0}
NAMES = (b":event-type", b":message-type", b":exception-type", b":error-code", b":content-type", b"x")
TEXTS = (b"event", b"exception", b"error", b"metadata", b"chunk", b"messageStart", b"contentBlockDelta", b"")
PAYLOADS = (
    b"",
    b"{}",
    b'{"usage":{"inputTokens":3,"outputTokens":4}}',
    b'{"bytes":"eyJ0eXBlIjoibWVzc2FnZV9zdG9wIn0="}',
)
SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
WORDS = (*NAMES, *TEXTS[:-1], *PAYLOADS[1:])
NAMED_BY = {"event": ":event-type", "exception": ":exception-type", "error": ":error-code"}


def _header(reader: Reader) -> bytes:
    how = reader.byte()
    if how % 8 == 7:
        return reader.some()
    name = reader.pick(NAMES) if how % 8 < 6 else reader.some()[:255]
    kind = 7 if how & 0x18 else how >> 5
    value = reader.pick(TEXTS) if how & 0x80 else reader.some()
    if kind in (6, 7):
        value = struct.pack(">H", len(value)) + value
    return bytes([len(name)]) + name + bytes([kind]) + value[: SIZES.get(kind, len(value))]


def _frame(reader: Reader) -> bytes:
    how = reader.byte()
    if how % 16 == 15:
        return reader.some()
    block = b"".join(_header(reader) for _ in range(how % 4))
    payload = reader.pick(PAYLOADS) if how & 0x40 else reader.some() * (1 + 20 * (how >> 7))
    prelude = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    if how & 0x20 and reader.byte() % 4 == 0:
        prelude = reader.take(8).ljust(8, b"\0")
    prelude += struct.pack(">I", crc32(prelude))
    whole = prelude + block + payload
    return whole + struct.pack(">I", crc32(whole))


def one(data: bytes) -> None:
    reader = Reader(data)
    seed, is_raw = reader.byte(), reader.byte() % 4 == 3
    stream = reader.rest() if is_raw else b"".join(iter(lambda: _frame(reader) if reader.left else b"", b""))
    whole, found = _watched([stream])
    split, found_split = _watched(pieces(stream, seed))
    same(found_split, found, "frames in pieces")
    outcome = (whole.frames, whole.boundary, str(whole.close()))
    same((split.frames, split.boundary, str(split.close())), outcome, "the stream in pieces")
    _as_botocore_reads(stream, whole, found)
    _usage(stream, seed)


def _watched(parts: list[bytes]) -> tuple[FrameWatcher, list[EventFrame]]:
    watcher = FrameWatcher(WANTED)
    found: list[EventFrame] = []
    fed = 0
    for part in parts:
        found += watcher.feed(part)
        fed += len(part)
        if watcher.failure is None:
            same(watcher.boundary + watcher.unfinished, fed, "how far it has come")
    return watcher, found


def _as_botocore_reads(stream: bytes, watcher: FrameWatcher, found: list[EventFrame]) -> None:
    """Frame by frame, up to the end or a fault; though botocore takes headers that are cut short, or come twice."""
    at = frames = 0
    expected: list[EventFrame] = []
    while at < watcher.boundary:
        total = int.from_bytes(stream[at : at + 4], "big")
        # A frame whose payload is not read is not verified, so its last CRC may be wrong.
        frame = stream[at : at + total - 4]
        message = _by_botocore(frame + struct.pack(">I", crc32(frame)))
        holds(message is not None, f"a frame to the watcher, and none to botocore: {frame!r}")
        expected += _wanted(message)
        at += total
        frames += 1
    same((at, frames), (watcher.boundary, watcher.frames), "where frames end")
    same(found, expected, "frames")
    total = int.from_bytes(stream[at : at + 4], "big")
    if _by_botocore(stream[at : at + total]) is not None:
        why = str(watcher.failure)
        holds("headers cannot be read" in why or "comes twice" in why, f"a frame to botocore alone: {why}")


def _by_botocore(frame: bytes) -> Any:
    buffer = EventStreamBuffer()
    buffer.add_data(frame)
    try:
        messages = list(buffer)
    except (ParserError, KeyError, struct.error, UnicodeDecodeError):
        return None
    return messages[0] if len(messages) == 1 else None


def _wanted(message: Any) -> list[EventFrame]:
    headers = message.headers
    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    kind = texts.get(":message-type", "event" if ":message-type" not in headers else "")
    name = texts.get(NAMED_BY.get(kind, ""), "")
    keep = WANTED.get(name) if kind not in ("exception", "error") else MAX_EXCEPTION_PAYLOAD
    size = len(message.payload)
    return [] if keep is None else [EventFrame(kind, name, message.payload[max(0, size - keep) :], size)]


def _usage(stream: bytes, seed: int) -> None:
    """Whatever is read of it is sound, and the same in pieces; and our own frames read back as they were made."""
    for operation in (Operation.CONVERSE_STREAM, Operation.INVOKE_STREAM):
        readings = []
        for parts in ([stream], pieces(stream, seed)):
            reader = build_reader(operation, "openai", b"application/vnd.amazon.eventstream", {})
            for part in parts:
                reader.feed(part)
            readings.append((reader.usage(), reader.partial_usage(), reader.estimate_output(), reader.has_failed))
        same(readings[1], readings[0], "usage in pieces")
        for usage in readings[0][:2]:
            holds(usage is None or min(usage[:5]) >= 0, f"less than nothing: {usage}")
    ours = encode_frame({":message-type": "exception", ":exception-type": "x"}, stream[:1000])
    same(_by_botocore(ours).payload, stream[:1000], "a frame of ours")
