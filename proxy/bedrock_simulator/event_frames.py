"""Encodes AWS event-stream frames, independently of the proxy's encoder, so that both cannot share a mistake. Pure."""

from __future__ import annotations

from functools import lru_cache
from struct import pack
from zlib import crc32

import orjson

_STRING = 7  # the type number of a header whose value is a string
_PRELUDE_BYTES = 12
_TRAILER_BYTES = 4

_PADDING = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def encode_event(kind: str, content: dict[str, object]) -> bytes:
    """An event frame. Like Bedrock it has padding that hides the length of the text, in an undocumented member."""
    payload = orjson.dumps(content)
    length = 1 + crc32(payload) % len(_PADDING)
    return _encode_frame(_encode_headers("event", kind), payload[:-1] + b',"p":"%s"}' % _PADDING[:length].encode())


def encode_exception(kind: str, message: str) -> bytes:
    return _encode_frame(_encode_headers("exception", kind), orjson.dumps({"message": message}))


def corrupt_checksum(frame: bytes) -> bytes:
    """The frame with a wrong checksum."""
    return frame[:-1] + bytes([frame[-1] ^ 0xFF])


@lru_cache(maxsize=64)
def _encode_headers(message: str, kind: str) -> bytes:
    headers = ((f":{message}-type", kind), (":content-type", "application/json"), (":message-type", message))
    return b"".join(
        pack("!B", len(name)) + name.encode() + pack("!BH", _STRING, len(value)) + value.encode()
        for name, value in headers
    )


def _encode_frame(headers: bytes, payload: bytes) -> bytes:
    total = _PRELUDE_BYTES + len(headers) + len(payload) + _TRAILER_BYTES
    prelude = pack("!II", total, len(headers))
    checked = b"".join((prelude, pack("!I", crc32(prelude)), headers, payload))
    return checked + pack("!I", crc32(checked))
