"""A body of any allowed size is validated with bounded work, so that other requests do not wait for it."""

from __future__ import annotations

import difflib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from price_keeper.config import config_problems
from price_keeper.config.config_problems import (
    MAX_COMPARED,
    MAX_GUESSES,
    MAX_SHOWN,
    escape_line,
    find_nearest,
    limit_guesses,
)
from price_keeper.config.config_sections import parse_config
from price_keeper.control.api_constants import MAX_BODY_BYTES
from price_keeper.control.api_errors import MAX_DETAILS, ApiError
from price_keeper.control.control_requests import MAX_JSON_VALUES, parse_json
from price_keeper.errors import ConfigError

from tests.support.control_harness import API, SETTINGS, ControlHarness, open_control_harness
from tests.support.engines import Engines


class Compared:
    """How often difflib was asked, and with how many names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.names = 0
        monkeypatch.setattr(config_problems, "get_close_matches", self._counted)

    def _counted(self, word: str, options: Any, **more: Any) -> list[str]:
        self.calls += 1
        self.names += len(options)
        return difflib.get_close_matches(word, options, **more)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Compared:
    return Compared(monkeypatch)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ControlHarness]:
    async with Engines({}).open("sqlite", tmp_path) as store, open_control_harness(store, tmp_path) as made:
        yield made


def labels(count: int) -> dict[str, int]:
    return {f"premiun{number}": 1 for number in range(count)}


PLAIN = SETTINGS | {"quotas": {**SETTINGS["quotas"], "premuim": 1}}
HOSTILE = {
    "quotas": SETTINGS | {"quotas": labels(1900)},
    "settings": SETTINGS | {f"org_nam{number}": 1 for number in range(1900)},
    "long names": SETTINGS | {"quotas": {f"{number}premium" * 40: 1 for number in range(500)}},
    "both": SETTINGS | {f"quota{number}": 1 for number in range(900)} | {"quotas": labels(900)},
}


async def test_single_mistake_suggests_correction(api: ControlHarness, compared: Compared) -> None:
    answer = await api.ask("PUT", API, PLAIN)
    assert (answer.status, compared.calls) == (400, 1)
    assert answer.body["details"][0]["message"].endswith('did you mean "premium"?')


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_body_costs_at_most_a_dozen_times_a_plain_one(
    api: ControlHarness, compared: Compared, name: str
) -> None:
    await api.ask("PUT", API, PLAIN)
    plain = compared.calls
    for _ in range(2):  # the next body has guesses of its own
        before = compared.calls
        answer = await api.ask("PUT", API, HOSTILE[name])
        assert answer.status == 400
        assert compared.calls - before == (0 if name == "long names" else MAX_GUESSES * plain)
        details = answer.body["details"]
        assert len(details) == MAX_DETAILS + 1
        assert details[-1]["message"].startswith("and ")
        assert details[-1]["message"].endswith(" more mistakes")
        assert max(len(each["path"]) for each in details) <= MAX_SHOWN + len("quotas.")
        assert len(answer.raw) < 20_000


async def test_number_of_omitted_mistakes_is_stated(api: ControlHarness) -> None:
    answer = await api.ask("PUT", API, SETTINGS | {"quotas": SETTINGS["quotas"] | labels(MAX_DETAILS + 7)})
    assert answer.body["details"][-1] == {"path": "", "message": "and 7 more mistakes"}
    answer = await api.ask("PUT", API, SETTINGS | {"quotas": SETTINGS["quotas"] | labels(MAX_DETAILS)})
    assert len(answer.body["details"]) == MAX_DETAILS
    login = {f"x{number}": 1 for number in range(100)}
    answer = await api.ask("POST", "/auth/token", login, who=None)
    assert answer.body["details"][-1] == {"path": "", "message": "and 82 more mistakes"}


@pytest.mark.parametrize(
    "text",
    [
        "[" + "{}," * 80_000 + "0]",
        "[" + "[]," * 80_000 + "0]",
        "[" + "1," * 120_000 + "0]",
        json.dumps({f"a{number}": 0 for number in range(20_000)}),
        json.dumps([[0] * 30] * (MAX_JSON_VALUES // 30)),
    ],
)
def test_body_with_too_many_values_is_refused_early(text: str) -> None:
    assert len(text) <= MAX_BODY_BYTES
    with pytest.raises(ApiError, match=f"at most {MAX_JSON_VALUES} names and values"):
        parse_json(text.encode())


def test_largest_realistic_bodies_are_accepted() -> None:
    usage = {f"field_{number}": number for number in range(9)}
    assert parse_json(json.dumps({"items": [usage] * 100}).encode())
    assert parse_json(json.dumps(SETTINGS | {"quotas": labels(1500)}).encode())


def test_suggestion_among_thousand_names_compares_few(compared: Compared) -> None:
    names = [f"label-{number}" for number in range(3000)]
    with limit_guesses():
        for number in range(1000):
            find_nearest(f"labul-{number}", names)
    assert compared.names <= 3 * MAX_COMPARED
    assert compared.calls >= 1
    assert find_nearest("premuim", ["premium"]) == "premium"  # a later suggestion has its own limit


def test_configuration_suggestions_and_mistakes_are_bounded(compared: Compared) -> None:
    lines = "".join(f"  jurnal{number}: 1\n" for number in range(3000))
    with pytest.raises(ConfigError) as refused:
        parse_config(f"journal:\n{lines}", "config.yaml", {})
    assert compared.calls <= MAX_GUESSES
    problems = refused.value.problems
    assert len(problems) == config_problems.MAX_REPORTED + 1
    assert problems[-1] == f"and {3001 - config_problems.MAX_REPORTED} more mistakes"
    compared.calls = 0
    with pytest.raises(ConfigError, match="did you mean"):
        parse_config("jurnal: 1\n", "config.yaml", {})
    assert compared.calls == 1


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 東京", "a\nb\x00\x1b[31m", "\u202eevil\ud800"])
def test_printable_line_keeps_its_content(text: str) -> None:
    escaped = escape_line(text)
    assert escaped.isprintable()
    assert escaped.encode().decode("utf-8") == escaped
    assert (escaped == text) is text.isprintable()
