"""Shared by HTTP/1.1 and HTTP/2: memory accounting, body buffering, and checks of host and target. Pure."""

from __future__ import annotations

import re
from io import SEEK_END, BytesIO
from typing import Final, TypeAlias

# One growing buffer: joining a list of pieces would need the memory of the body a second time.
Body: TypeAlias = bytes | BytesIO

# Memory that Python needs for each header beyond its bytes; without it, many short headers would count as almost none.
HEADER_OVERHEAD_BYTES: Final = 160

# A name, an address, or nothing, as where a URL has no host. User names, paths and lists of hosts are excluded,
# because servers interpret them differently.
_AUTHORITY: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{0,253})(?::[0-9]{0,5})?")
_ABSOLUTE: Final = re.compile(rb"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")
SCHEMES: Final = (b"http", b"https")


def measure_head(target: bytes, headers: dict[bytes, bytes]) -> int:
    """Bytes of memory that a request's head takes."""
    return len(target) + len(b"".join(headers)) + len(b"".join(headers.values())) + HEADER_OVERHEAD_BYTES * len(headers)


def append_to_body(body: Body, data: bytes) -> Body:
    """The body with `data` at its end. A body that arrives in one piece is not copied."""
    if isinstance(body, bytes):
        if not body:
            return data
        body = BytesIO(body)
        body.seek(0, SEEK_END)
    body.write(data)
    return body


def finish_body(body: Body) -> bytes:
    """The complete body as bytes, without a copy: the buffer itself becomes the result."""
    return body if isinstance(body, bytes) else body.getvalue()


def find_host_error(host: bytes) -> str | None:
    """What is wrong with the value of a Host header or of `:authority`; None if it is valid."""
    return None if _AUTHORITY.fullmatch(host) else "a request's host is a name or an address, and a port at most"


def find_target_error(target: bytes, host: bytes) -> str | None:
    """What is wrong with the target of a request line; None if it is valid. A target in absolute form must name the
    same host as the Host header."""
    if target.startswith(b"/") or target == b"*":
        return None
    match = _ABSOLUTE.match(target)
    if match is None:
        return "a request's target is a path"
    scheme, authority = match[1].lower(), match[2]
    if scheme not in SCHEMES:
        return "a request's scheme is http or https"
    if not authority or authority.lower() != host.lower():
        return "the host of the request's target and its Host header differ"
    return None
