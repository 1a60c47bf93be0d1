"""Whether a request that shows the page's cookie was made by the page itself. Pure.

A browser adds the cookie to whatever is asked of this host, by whichever page, and ports make no difference to it. Only
a page of ours can add this header: one from elsewhere would have to ask for leave first, which nobody gives here.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from multidict import MultiMapping

from price_keeper.control.api_errors import forbidden

PAGE_HEADER = "X-Price-Keeper-Page"


def has_page_header(headers: MultiMapping[str]) -> bool:
    return headers.getall(PAGE_HEADER, []) == ["1"]


def check_same_origin(headers: MultiMapping[str], *, is_change: bool) -> None:
    """Raises Problem."""
    if not has_page_header(headers):
        raise forbidden(f"a page says that it is one: {PAGE_HEADER}: 1")
    if headers.getall("Sec-Fetch-Site", ["same-origin"]) != ["same-origin"]:
        raise forbidden("a page from elsewhere may not ask this")
    origins, hosts = headers.getall("Origin", []), headers.getall("Host", [])
    if not origins and not is_change:  # browsers leave it out of what they read from where the page came from
        return
    if len(origins) != 1 or len(hosts) != 1 or not is_origin_of_host(origins[0], hosts[0]):
        raise forbidden("a change is asked for by a page from here: Origin names the Host; a proxy passes both on")


def is_origin_of_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""
