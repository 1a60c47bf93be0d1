"""What a request weighs while it is here, and its body while it comes in."""

from __future__ import annotations

from io import SEEK_END, BytesIO
from typing import Final, TypeAlias

# Pieces are put into one buffer that grows: a list of them has to be joined, which takes their memory once more.
Body: TypeAlias = bytes | BytesIO

HEADER_OVERHEAD_BYTES: Final = (
    160  # what Python keeps for a header beyond its own bytes: many short ones must not weigh nothing
)


def measure_head(target: bytes, headers: dict[bytes, bytes]) -> int:
    """Of a request's head, in memory."""
    return len(target) + len(b"".join(headers)) + len(b"".join(headers.values())) + HEADER_OVERHEAD_BYTES * len(headers)


def append_to_body(body: Body, data: bytes) -> Body:
    """What has come of a body by now. A body that comes in one piece is that piece."""
    if isinstance(body, bytes):
        if not body:
            return data
        body = BytesIO(body)
        body.seek(0, SEEK_END)
    body.write(data)
    return body


def finish_body(body: Body) -> bytes:
    """Not a copy: the buffer becomes the result."""
    return body if isinstance(body, bytes) else body.getvalue()
