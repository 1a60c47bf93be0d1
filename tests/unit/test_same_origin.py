"""Which requests with a cookie come from the page itself."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from multidict import CIMultiDict
from price_keeper.control.api_errors import ApiError
from price_keeper.control.control_access import check_same_origin, cookie_name, read_cookie

PAGE = ("X-Price-Keeper-Page", "1")
HOST = ("Host", "127.0.0.1:8081")
OURS = ("Origin", "http://127.0.0.1:8081")

# The headers, whether a read passes, and whether a change does.
CASES: list[tuple[list[tuple[str, str]], bool, bool]] = [
    ([PAGE, HOST, OURS], True, True),
    ([PAGE, HOST], True, False),
    ([PAGE, HOST, ("Sec-Fetch-Site", "same-origin")], True, False),
    ([PAGE, HOST, OURS, ("Sec-Fetch-Site", "same-origin")], True, True),
    ([PAGE, ("Host", "keeper.example"), ("Origin", "https://keeper.example")], True, True),
    ([PAGE, ("Host", "Keeper.example"), ("Origin", "https://keeper.EXAMPLE")], True, True),
    ([HOST, OURS], False, False),
    ([("X-Price-Keeper-Page", "0"), HOST, OURS], False, False),
    ([PAGE, PAGE, HOST, OURS], False, False),
    ([PAGE, HOST, ("Origin", "http://127.0.0.1:3000")], False, False),
    ([PAGE, HOST, ("Origin", "http://127.0.0.1:80811")], False, False),
    ([PAGE, HOST, ("Origin", "http://evil.example")], False, False),
    ([PAGE, HOST, ("Origin", "http://evil.example@127.0.0.1:8081")], False, False),
    ([PAGE, HOST, ("Origin", "null")], False, False),
    ([PAGE, HOST, ("Origin", "")], False, False),
    ([PAGE, HOST, ("Origin", "http://[")], False, False),
    ([PAGE, HOST, ("Origin", "file://127.0.0.1:8081")], False, False),
    ([PAGE, HOST, OURS, OURS], False, False),
    ([PAGE, ("Host", ""), ("Origin", "http://")], False, False),
    ([PAGE, OURS], False, False),
    ([PAGE, HOST, OURS, ("Sec-Fetch-Site", "same-site")], False, False),
    ([PAGE, HOST, OURS, ("Sec-Fetch-Site", "cross-site")], False, False),
]


@pytest.mark.parametrize(("headers", "may_read", "may_change"), CASES)
def test_same_origin_rules_allow_read_and_change(
    headers: list[tuple[str, str]], may_read: bool, may_change: bool
) -> None:
    for is_change, passes in ((False, may_read), (True, may_change)):
        with nullcontext() if passes else pytest.raises(ApiError, check=lambda failure: failure.status == 403):
            check_same_origin(CIMultiDict(headers), is_change=is_change)


@pytest.mark.parametrize(
    ("host", "cookies", "expected"),
    [
        ("127.0.0.1:8081", ["price-keeper-8081=a.b.c"], "a.b.c"),
        ("127.0.0.1:8081", ["other=1; price-keeper-8081=a.b.c; more=2"], "a.b.c"),
        ("127.0.0.1:8081", ["price-keeper-8082=a.b.c"], None),
        ("127.0.0.1:8081", ["price-keeper-8081=a", "price-keeper-8081=b"], None),
        ("127.0.0.1:8081", ["price-keeper-8081="], None),
        ("127.0.0.1:8081", ["price-keeper-8081"], None),
        ("127.0.0.1:8081", [";;=;"], None),
        ("keeper.example", ["price-keeper=a.b.c"], "a.b.c"),
        ("keeper.example:x", ["price-keeper=a.b.c"], "a.b.c"),
        ("127.0.0.1:8081", [], None),
    ],
)
def test_cookie_is_read_for_this_port_and_only_once(host: str, cookies: list[str], expected: str | None) -> None:
    headers = CIMultiDict([("Host", host), *(("Cookie", each) for each in cookies)])
    assert read_cookie(headers) == expected
    assert cookie_name(headers).startswith("price-keeper")
