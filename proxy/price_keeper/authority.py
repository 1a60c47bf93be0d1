"""How a request names the host that it is for. Pure."""

from __future__ import annotations

import re
from typing import Final

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
