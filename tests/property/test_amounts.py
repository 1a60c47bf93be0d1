"""Amounts of money as people write them: exact, in every form, and nothing else is taken for one."""

from __future__ import annotations

import re
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.budgets.effective_settings import MAX_QUOTA_MICROS
from price_keeper.budgets.org_settings import InvalidSettings, validate_app
from price_keeper.domain import AMOUNT_FORMS, AMOUNT_PATTERN, parse_micros

_MICROS = st.integers(0, MAX_QUOTA_MICROS)
_MICRO_UNITS = ("micro-USD", "µUSD", "\u03bcUSD")
HOSTILE = [
    "",
    " ",
    "$",
    "USD",
    "5",
    "5000000",
    "5.0",
    "-5 USD",
    "+5 USD",
    "$-5",
    "-$5",
    "$ 5",
    "$5 USD",
    "5$",
    "USD 5",
    "5  USD",
    " 5 USD",
    "5 USD ",
    "5 USD\n",
    "5\nUSD",
    "5\u00a0USD",
    "5 usd",
    "5 EUR",
    "5 USDT",
    "05 USD",
    "00 USD",
    "5. USD",
    ".5 USD",
    "5,00 USD",
    "1,000 USD",
    "1_ USD",
    "_1 USD",
    "1__0 USD",
    "1.0_0 USD",
    "1e3 USD",
    "0x10 USD",
    "inf USD",
    "nan USD",
    "0.0000001 USD",
    "0.5 micro-USD",
    "5 micro-usd",
    "5 mUSD",
    "\u0665 USD",
    "\uff15 USD",
    "\u00b2 USD",
    "5 USD\u200b",
    "\x005 USD",
]


def _refuses(text: str) -> bool:
    try:
        parse_micros(text)
    except ValueError as failure:
        return AMOUNT_FORMS in str(failure)
    return False


def _spellings(micros: int) -> list[str]:
    whole, part = divmod(micros, 10**6)
    decimals = f"{part:06}"
    short = decimals.rstrip("0")
    numbers = {f"{whole}.{decimals}", f"{whole}.{short}" if short else str(whole), f"{whole:_}.{decimals}"}
    return [
        *(form.format(number) for number in numbers for form in ("{} USD", "{}USD", "${}")),
        *(f"{number}{unit}" for number in (micros, f"{micros:_} ") for unit in _MICRO_UNITS),
    ]


@given(_MICROS)
def test_amount_in_every_form_is_read_exactly(micros: int) -> None:
    assert {parse_micros(spelling) for spelling in _spellings(micros)} == {micros}


@given(st.from_regex(AMOUNT_PATTERN, fullmatch=True))
def test_amount_equals_exact_fraction(text: str) -> None:
    number = Fraction(re.sub("[^0-9.]", "", text))
    assert parse_micros(text) == (number if text.endswith(_MICRO_UNITS) else number * 10**6)


@given(st.one_of(st.text(), st.text("0123456789_.$ USDmicro-µ", max_size=14)))
def test_any_other_text_is_refused_with_allowed_forms(text: str) -> None:
    assert re.fullmatch(AMOUNT_PATTERN, text) or _refuses(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_amount_is_refused(text: str) -> None:
    assert _refuses(text)


def test_huge_amount_is_refused_at_once() -> None:
    started = time.process_time()
    assert all(_refuses(text) for text in ("9" * 10**6 + " USD", "$" * 10**6, "1" + "_1" * 10**6 + " USD"))
    assert time.process_time() - started < 1


def _put_quota(amount: Any) -> Any:
    return validate_app({"app_name": "Shop", "quotas": {"premium": amount}}, ["premium"], {})["quotas"]


@given(_MICROS, st.data())
def test_quota_is_stored_in_micros_however_it_is_written(micros: int, data: st.DataObject) -> None:
    written = data.draw(st.sampled_from([micros, *_spellings(micros)]))
    assert _put_quota(written) == {"premium": micros}


def test_whole_number_in_quotes_is_to_be_written_without_them() -> None:
    with pytest.raises(InvalidSettings, match=r'or 5000000 without quotes, .*; found "5000000"'):
        _put_quota("5000000")


_NOT_QUOTAS = [*HOSTILE, 5.0, -1, True, ["5 USD"], {"usd": 5}, "1000000000.000001 USD", 10**15 + 1]


@pytest.mark.parametrize("amount", _NOT_QUOTAS)
def test_quota_of_wrong_amount_names_allowed_forms(amount: Any) -> None:
    with pytest.raises(InvalidSettings) as caught:
        _put_quota(amount)
    ((path, complaint),) = caught.value.mistakes
    assert path == ("quotas", "premium")
    assert f"such as {AMOUNT_FORMS}; found " in complaint
