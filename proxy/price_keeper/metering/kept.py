"""An answer in one piece, as it comes in: kept up to its end, unless it is too large to be looked into. Pure."""

from __future__ import annotations

MAX_BUFFERED_BYTES = 16 * 1024 * 1024  # a longer one, such as a film, is known by its headers or estimated


class BodyBuffer:
    __slots__ = ("_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.size = 0

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        if self.size <= MAX_BUFFERED_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    @property
    def is_too_large(self) -> bool:
        return self.size > MAX_BUFFERED_BYTES

    def to_bytes(self) -> bytes:
        """Empty if it is too large."""
        parts = self._parts
        return parts[0] if len(parts) == 1 else b"".join(parts)
