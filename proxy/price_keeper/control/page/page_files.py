"""The page itself: files of this package, which hold no data and so are for anybody."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files

from price_keeper.control.calls import HTML, ApiResponse, ApiRequest, ApiRoute, AccessLevel, compute_etag_of_bytes
from price_keeper.control.parts import ControlServices
from price_keeper.control.problems import not_found

_NAME = re.compile(r"[a-z-]{1,32}\.[a-z]{1,8}", re.ASCII)
_KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}
# Its own files and answers and nothing else: no script or style within the page, no frame around it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_OWN = {"Cross-Origin-Resource-Policy": "same-origin"}
_OF_PAGE = {
    **_OWN,
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


async def page(_: ControlServices, __: ApiRequest) -> ApiResponse:
    return ApiResponse(_read("index.html"), content_type=HTML, headers=_OF_PAGE)


async def file(_: ControlServices, request: ApiRequest) -> ApiResponse:
    name = request.path["file"]
    kind = _KINDS.get(name.rpartition(".")[2])
    content = _read(name) if kind is not None and _NAME.fullmatch(name) else None
    if kind is None or content is None:
        raise not_found("there is nothing here")
    return ApiResponse(content, cache_control="no-cache", etag=compute_etag_of_bytes(content), content_type=kind, headers=_OWN)


@lru_cache(maxsize=64)
def _read(name: str) -> bytes | None:
    found = files(__package__).joinpath("files", name)
    return found.read_bytes() if found.is_file() else None


ROUTES = (
    ApiRoute("GET", "/status", AccessLevel.PUBLIC, "statusPage", "The status page; what it shows, it asks for once somebody has "
          "signed in", page, {200: ""}, group="page", media_types=(HTML,), is_rate_limit_exempt=True),
    ApiRoute("GET", "/status/{file}", AccessLevel.PUBLIC, "statusPageFile", "A script, style or picture of the status page",
          file, {200: ""}, (404,), group="page", media_types=tuple(_KINDS.values()), is_rate_limit_exempt=True),
)  # fmt: skip
