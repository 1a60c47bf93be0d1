"""What a soak finds: each kind of mistake in the books is seen, and none where there is none."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.books import Books
from tests.soak.fleet import InForce, Member
from tests.soak.harvest import TABLES
from tests.soak.links import Link
from tests.soak.tenants import CLAUDE, TURNING, pico
from tests.soak.verdict import Verdict

TOKENS = (100, 20, 0, 0, 0)
TOKEN_COUNTS = "100,20,0,0,0"
PRICES_CHANGE = 500.0

Db = sqlite3.Connection


@pytest.fixture
def db() -> Db:
    """One call at each price, and one that was cut on its way."""
    made = sqlite3.connect(":memory:")
    made.executescript(TABLES)
    _ran(made, "first", 100.0)
    _recorded(made, "first", 100.0, pico(0, "premium", TOKENS))
    _ran(made, "second", 900.0)
    _recorded(made, "second", 900.0, pico(1, "premium", TOKENS))
    _ran(made, "cut", 200.0)
    _recorded(made, "cut", 200.0, 7, why="cut")
    made.execute("insert into whole values ('first'), ('second')")
    return made


def _ran(db: Db, request: str, arrived: float, *, is_whole: bool = True) -> None:
    row = (request, f"steady.{request}", CLAUDE, arrived, arrived + 1, is_whole, "", TOKEN_COUNTS)
    db.execute("insert into ran values (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _recorded(db: Db, request: str, started: float, paid: int, tokens: str = TOKEN_COUNTS, why: str = "") -> None:
    scope, day = f"ORG#{TURNING}#APP#steady", "DAY#19700101"
    row = ("alone", "segment", scope, "premium", day, started, request, why, paid, tokens, 1, False)
    db.execute("insert into receipts values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def _missed(db: Db, tmp_path: Path, *ends: tuple[float, float]) -> list[str]:
    member = Member("alone", tmp_path / "alone", "", {})
    member.ends = [*ends]
    member.history = [InForce(0, 0.0, 1.0), InForce(1, PRICES_CHANGE, PRICES_CHANGE + 1)]
    link, verdict = Link("", 0), Verdict()
    link.hit, link.hit_at = {"steady.cut"}, [200.0]
    books = Books(db, [member], [link], verdict)
    books.measure_ways()
    books.compare_calls()
    books.compare_days({TURNING: "UTC"})
    books.explain_estimates()
    return [goal.goal for goal in verdict.goals if not goal.is_reached]


def test_consistent_books_are_accepted(db: Db, tmp_path: Path) -> None:
    assert _missed(db, tmp_path) == []


MISTAKES: dict[str, Callable[[Db], object]] = {
    "calls recorded twice": lambda db: _recorded(db, "first", 100.0, pico(0, "premium", TOKENS)),
    "calls recorded that Bedrock never served": lambda db: _recorded(db, "nobody's", 100.0, 1),
    "calls recorded with other tokens than Bedrock's": lambda db: db.execute(
        "update receipts set tokens = '100,21,0,0,0' where request = 'first'"
    ),
    "calls at another price than the one in force when they began": lambda db: db.execute(
        "update receipts set pico = ? where request = 'second'", [pico(0, "premium", TOKENS)]
    ),
    "estimates that cost nothing": lambda db: db.execute("update receipts set pico = 0 where request = 'cut'"),
    "estimates for another reason than a cut, silence or a kill": lambda db: db.execute(
        "update receipts set why = 'fault' where request = 'cut'"
    ),
    "estimates of calls that nothing befell": lambda db: (
        _ran(db, "spared", 300.0),
        _recorded(db, "spared", 300.0, 7, why="cut"),
    ),
    "estimates without an answer at a time at which nothing befell any": lambda db: _recorded(
        db, "", 300.0, 7, why="no answer"
    ),
    "calls not recorded exactly though nothing befell them": lambda db: _ran(db, "lost", 300.0),
    "calls on another day, or paid otherwise, than their org says": lambda db: db.execute(
        "update receipts set period = 'DAY#19700102' where request = 'cut'"
    ),
    "answers that a caller had whole, and that are not recorded exactly": lambda db: db.execute(
        "insert into whole values ('cut')"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_detected(mistake: str, db: Db, tmp_path: Path) -> None:
    MISTAKES[mistake](db)
    assert mistake in _missed(db, tmp_path)


def test_call_missing_in_all_books_is_detected(db: Db, tmp_path: Path) -> None:
    """Broken off, so it may be estimated; but it has to be."""
    db.execute("delete from receipts where request = 'cut'")
    assert _missed(db, tmp_path) == ["calls that were served and of which there is not even an estimate"]


@pytest.mark.parametrize("otherwise", ["is_held = 1", "scopes = 2"])
def test_call_with_settings_of_no_org_is_detected(otherwise: str, db: Db, tmp_path: Path) -> None:
    """As one of a sidecar that does not know them."""
    db.execute(f"update receipts set {otherwise} where request = 'cut'")
    assert _missed(db, tmp_path) == ["calls on another day, or paid otherwise, than their org says"]


@pytest.mark.parametrize(("slowest", "accepted"), [(4.0, True), (1.0, False)])
def test_answer_on_its_way_when_its_sidecar_was_killed_is_as_slow_as_calls_were(
    slowest: float, accepted: bool, db: Db, tmp_path: Path
) -> None:
    """Bedrock had ended it at 301 s; the sidecar was killed at 304 s and charges it by estimate."""
    _ran(db, "answered", 300.0)
    _recorded(db, "", 299.9, 7, why="unknown")
    _ran(db, "slow", 400.0 + slowest)
    _recorded(db, "slow", 400.0, pico(0, "premium", TOKENS))
    missed = _missed(db, tmp_path, (304.0, 305.0))
    assert ("calls not recorded exactly though nothing befell them" not in missed) is accepted
