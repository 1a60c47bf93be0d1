"""What both protocols need to build a request: its memory use, its growing body, and checks of the host it names. Pure."""

from __future__ import annotations

import re
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


# A name, an address, or nothing, as where a URL has no host. No user, path or list: readers take those differently.
_AUTHORITY: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{0,253})(?::[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")
SCHEMES: Final = (b"http", b"https")


def find_host_error(host: bytes) -> str | None:
    """Of a Host header, or of `:authority`."""
    return None if _AUTHORITY.fullmatch(host) else "a request's host is a name or an address, and a port at most"


def find_target_error(target: bytes, host: bytes) -> str | None:
    """Of a request line's target, which may name a host of its own."""
    if target.startswith(b"/") or target == b"*":
        return None
    found = _ABSOLUTE.match(target)
    if found is None:
        return "a request's target is a path"
    scheme, authority = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        return "a request's scheme is http or https"
    if not authority or authority.lower() != host.lower():
        return "the host of the request's target and its Host header differ"
    return None
