"""The page's own helpers, in the browser that runs them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.support.commands import Sidecar

# The page itself makes no code of text; these tests do.
pytestmark = pytest.mark.parametrize("page", [{"bypass_csp": True}], indirect=True, ids=[""])

NOON = 1_795_003_200  # 2026-11-18 12:00 UTC
ROW = {"serves": "premium", "active_label": "premium", "is_overridden": False, "is_stale": False}
FIGURES = {"label": "premium", "quota_pct": 42, "mode": "NORMAL"}

# A module, an expression with what it exports, and its value.
CASES: list[tuple[str, str, Any]] = [
    ("format", "[0, '0', '1', '99', '100', 123456, 1234567, '1234567890000', '0.5'].map(usd)",
     ["$0.00", "$0.00", "<$0.0001", "<$0.0001", "$0.0001", "$0.1235", "$1.23", "$1,234,567.89", "<$0.0001"]),
    ("format", "['1', '1.5', ' $1,000.000001 ', '0', '999999999.999999'].map(toMicros)",
     [1_000_000, 1_500_000, 1_000_000_001, 0, 999_999_999_999_999]),
    ("format", "['.5', '', '-1', '1e3', '1.1234567', 'x'].map(toMicros)", [None] * 6),
    ("format", "[0, 1, 1500000, 1000000, 999999999999999].map(toDollars)",
     ["0.00", "0.000001", "1.50", "1.00", "999999999.999999"]),
    ("format", "[0, 29, 60, 3540, 3600, 9000, 86400 * 3].map(lasting)",
     ["less than a minute", "less than a minute", "a minute", "59 minutes", "1 h", "2 h 30 min", "3 days"]),
    ("format", f"[clock({NOON}, {NOON}, 'Europe/Berlin'), clock({NOON + 86400}, {NOON}, 'UTC')]",
     ["13:00", "19 Nov, 12:00"]),
    ("format", f"reachedTold({{state: 'expected', at: '2026-11-18T14:30:00Z'}}, {NOON}, 'UTC')",
     "at 14:30, in 2 h 30 min"),
    ("format",
     f"[{{state: 'reached', at: null}}, {{state: 'unknown'}}, null].map((each) => reachedTold(each, {NOON}, 'UTC'))",
     ["spent, before anything is known here", "not known yet", "not known yet"]),
    ("format", "[shareTold(12, 'NORMAL'), shareTold(97, 'TIGHT'), shareTold(120, 'EXCEEDED')]",
     ["12 % spent", "97 % spent, nearly all", "120 % spent, all of it"]),
    ("chart", "[-1, 0, 50, 100, 150, 999].map((at) => valueAt([[0, 0], [100, 10], [200, 10]], at))",
     [0, 0, 5, 10, 10, 10]),
    ("chart", f"ticks({NOON}, {NOON + 3600}, 4).map((at) => at - {NOON})", [0, 900, 1800, 2700, 3600]),
    ("chart", "ticks(0, 86400 * 365, 5).length < 60", True),
    ("chart", "shares([[0, 0], [50, 10]], 20, 100, 15)", [[0, 0], [50, 50], [100, 75]]),
    ("chart", "[50, 101, 130].map((share) => top([{points: [[0, share]]}]))", [108, 108, 150]),
    ("chart", "frame({a: [[0, 1]], b: [[400, 1]]}, 1000, 86400)", {"start": 0, "now": 1000, "end": 1250}),
    ("chart", "frame({a: [[990, 1]]}, 1000, 1010)", {"start": 700, "now": 1000, "end": 1010}),
    ("chart", "numberOf({ordering: ['a', 'b'], labels: [{label: 'c'}]}, 'c')", 2),
    ("budgets", f"lineOf({json.dumps(ROW | {'labels': [FIGURES]})})".replace("False", "false"),
     {"text": "premium, 42 % spent", "share": 42, "mode": "NORMAL"}),
    ("budgets", f"lineOf({json.dumps(ROW | {'labels': [FIGURES], 'serves': None})}).text".replace("None", "null"),
     "all spent: calls are refused"),
    ("budgets", "lineOf({serves: null, active_label: null, labels: []}).text", "no budget"),
    ("budgets", f"lineOf({json.dumps(ROW | {'labels': [FIGURES], 'serves': 'economy'})}).text"
     .replace("False", "false"), "economy, unlimited"),
    ("budgets", "['#x', '', '#6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b', '#6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b/a%20b', "
     "'#6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b/%'].map(placeOf)",
     [None, None, {"org": "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "app": None},
      {"org": "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "app": "a b"}, None]),
    ("what-if", "[0, 500, 1000].map((at) => slid(at, 5000000, 1000000))", [0, 5_000_000, 10_000_000]),
    ("what-if", "[position(5000000, 5000000, 1), position(10 ** 9, 5000000, 1), position(0, 0, 0)]", [500, 1000, 0]),
    ("what-if", "outcome({label: 'premium', quota_usd_micros: 0, as_it_is: {serves: 'premium'}, "
     "as_it_would_be: {serves: null, would_have_served: null}})",
     "With $0.00 for premium, every quota would be spent, and calls refused."),
    ("in-full", "[{kind: 'moved', label: 'b', before: 'a'}, {kind: 'threshold', label: 'a', threshold_pct: 80}, "
     "{kind: 'threshold', label: 'a', threshold_pct: 100}].map(told)",
     ["a was spent: b became active for the rest of the period", "a reached 80 % of its quota", "a reached its quota"]),
    ("stream", "[0, 1, 5, 50].map((failures) => waitAfter(failures, 1))", [1000, 2000, 30_000, 30_000]),
]  # fmt: skip

EVENTS = (
    'retry: 3000\n\ndata: {"a": 1}\n\n: still here\n\nevent: end\r\ndata: x\r\ndata: y\r\n\r\n'
    "event: lost\n\ndata:z\n\ndata: cut"
)
READ = [["message", '{"a": 1}'], ["end", "x\ny"], ["message", "z"]]


@pytest.fixture
def loaded(page: Page, dev: Sidecar) -> Page:
    page.goto(f"{dev.control}/status")
    return page


def test_each_helper_does_what_it_says(loaded: Page) -> None:
    for module, expression, expected in CASES:
        result = loaded.evaluate(f"import('/status/{module}.js').then((each) => {{ {_with(expression)} }})")
        assert result == expected, (module, expression)


def _with(expression: str) -> str:
    """Whatever the module exports, by its name."""
    return f"return new Function(...Object.keys(each), {json.dumps('return ' + expression)})(...Object.values(each))"


def test_events_split_anywhere_are_read(loaded: Page) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
        result = loaded.evaluate(
            "import('/status/stream.js').then(({reader}) => { const found = [];"
            f" const feed = reader((...each) => found.push(each)); {json.dumps(pieces)}.forEach(feed); return found }})"
        )
        assert result == READ, size
