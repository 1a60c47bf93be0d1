"""A request's body while it comes in: in pieces as they come, but for those that would weigh more than they hold."""

from __future__ import annotations

SMALL_BYTES = 1024  # a piece of its own costs some 40 bytes


def add_part(parts: list[bytes | bytearray], data: bytes) -> None:
    if len(data) >= SMALL_BYTES:
        parts.append(data)
    elif isinstance(parts[-1], bytearray):
        parts[-1] += data
    else:
        parts.append(bytearray(data))


def joined(parts: list[bytes | bytearray]) -> bytes:
    return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
