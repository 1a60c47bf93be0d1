"""What a request weighs while it is here, and its body while it comes in: in pieces, but for very small ones."""

from __future__ import annotations

from typing import Final

SMALL_BYTES: Final = 1024  # a piece of its own costs some 40 bytes
HEADER_BYTES: Final = 160  # what Python keeps for a header beyond its own bytes: many short ones must not weigh nothing


def weight_of(target: bytes, headers: dict[bytes, bytes]) -> int:
    """Of a request's head, in memory."""
    return len(target) + len(b"".join(headers)) + len(b"".join(headers.values())) + HEADER_BYTES * len(headers)


def add_part(parts: list[bytes | bytearray], data: bytes) -> None:
    if len(data) >= SMALL_BYTES:
        parts.append(data)
    elif isinstance(parts[-1], bytearray):
        parts[-1] += data
    else:
        parts.append(bytearray(data))


def joined(parts: list[bytes | bytearray]) -> bytes:
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
