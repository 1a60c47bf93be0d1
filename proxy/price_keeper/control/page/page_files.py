"""The page itself: files of this package, which hold no data and so are for anybody."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files

from price_keeper.control.api_errors import not_found
from price_keeper.control.api_types import HTML, AccessLevel, ApiRequest, ApiResponse, ApiRoute, compute_etag_of_bytes
from price_keeper.control.control_services import ControlServices

_FILE_NAME = re.compile(r"[a-z-]{1,32}\.[a-z]{1,8}", re.ASCII)
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}
# Its own files and answers and nothing else: no script or style within the page, no frame around it.
PAGE_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_FILE_HEADERS = {"Cross-Origin-Resource-Policy": "same-origin"}
_PAGE_HEADERS = {
    **_FILE_HEADERS,
    "Content-Security-Policy": PAGE_CSP,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


async def get_page(_: ControlServices, __: ApiRequest) -> ApiResponse:
    return ApiResponse(_read_file("index.html"), content_type=HTML, headers=_PAGE_HEADERS)


async def get_file(_: ControlServices, request: ApiRequest) -> ApiResponse:
    name = request.path["file"]
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    content = _read_file(name) if media_type is not None and _FILE_NAME.fullmatch(name) else None
    if media_type is None or content is None:
        raise not_found("there is nothing here")
    return ApiResponse(
        content,
        cache_control="no-cache",
        etag=compute_etag_of_bytes(content),
        content_type=media_type,
        headers=_FILE_HEADERS,
    )


@lru_cache(maxsize=64)
def _read_file(name: str) -> bytes | None:
    resource = files(__package__).joinpath("files", name)
    return resource.read_bytes() if resource.is_file() else None


PAGE_FILE_ROUTES = (
    ApiRoute("GET", "/status", AccessLevel.PUBLIC, "statusPage", "The status page; what it shows, it asks for once somebody has "
          "signed in", get_page, {200: ""}, group="page", media_types=(HTML,), is_rate_limit_exempt=True),
    ApiRoute("GET", "/status/{file}", AccessLevel.PUBLIC, "statusPageFile", "A script, style or picture of the status page",
          get_file, {200: ""}, (404,), group="page", media_types=tuple(_MEDIA_TYPES.values()), is_rate_limit_exempt=True),
)  # fmt: skip
