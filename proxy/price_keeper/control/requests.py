"""What a request may look like before it is known what it asks for: its coding, its ids, its query and its headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from multidict import CIMultiDict

from price_keeper.control.api_errors import ERROR_CODES, ApiError, invalid_request
from price_keeper.control.api_types import ApiRoute
from price_keeper.domain import is_app_id, is_org_id

MAX_QUERY_VALUE_LENGTH = 1000  # characters of one value; aiohttp bounds the whole line
_ID_RULES: Mapping[str, tuple[Callable[[str], bool], str]] = {
    "org": (is_org_id, "an org id is a UUID in lower case"),
    "app": (is_app_id, "an app id is 1 to 64 letters, digits or any of ._-, and neither . nor .."),
}


def check_transfer_encoding(codings: list[str]) -> None:
    """What stands before us may undo another coding, and see another body than we do."""
    if codings and [each.strip().lower() for each in codings] != ["chunked"]:
        message = "a body comes with a Content-Length, or in chunks alone"
        raise ApiError(400, ERROR_CODES[400], message, headers={"Connection": "close"})


def check_path_ids(path: Mapping[str, str]) -> None:
    mistakes = [
        (name, _ID_RULES[name][1])
        for name, value in path.items()
        if name in _ID_RULES and not _ID_RULES[name][0](value)
    ]
    if mistakes:
        raise invalid_request("the path names nothing that can be there", *mistakes)


def parse_query(request: web.BaseRequest, route: ApiRoute) -> dict[str, str]:
    query = request.rel_url.query
    mistakes = [(name[:64], "unknown") for name in dict.fromkeys(query) if name not in route.query_schemas]
    mistakes += [(name, "given twice") for name in route.query_schemas if len(query.getall(name, [])) > 1]
    mistakes += [
        (name, "too long")
        for name, schema in route.query_schemas.items()
        if len(query.get(name, "")) > schema.get("maxLength", MAX_QUERY_VALUE_LENGTH)
    ]
    if mistakes:
        raise invalid_request("the query cannot be used", *mistakes)
    return dict(query)


def read_headers(request: web.BaseRequest) -> CIMultiDict[str]:
    """Of a header that came twice nobody can say which one is meant."""
    for name in ("If-Match", "If-None-Match", "X-Retrieval-Token", "Authorization"):
        if len(request.headers.getall(name, [])) > 1:
            raise invalid_request(f"{name} comes only once")
    return CIMultiDict(request.headers)
