"""The configuration: read, or refused with every mistake and its line; and a variable says what the file would."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from price_keeper.config.config_sections import ENV_PREFIX, Config, parse_config
from price_keeper.errors import ConfigError

from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

BASE = """listen: {data: 127.0.0.1:8080}
upstream: {endpoint: simulated, region: us-east-1}
store:
  engine: sqlite
auth:
  keys:
  - {kid: k1, alg: HS256, secret_env: SECRET}
  max_sessions: 5
labels:
  premium:
    model: anthropic.claude-v2:1
    format: anthropic
    prices_usd_per_1m: {input: 3.00, output: 15.00}
"""
LINES = BASE.splitlines(keepends=True)
TOKENS = re.findall(r"\w+|[^\w\n]|\n *", BASE)
PIECES = ("\n", "\n  ", ": ", "- ", "[", "]", "{", "}", ",", "#", "'", '"', "|\n", "? ", "~", "null", "yes", "&a ",
          "*a", "<<: ", "!!int ", "!!set ", "---\n", "...\n", '"\\U99999999"', '"\\ud800"', ".nan", "-.inf", "1e9999",
          "0x1F", "1:30", "9" * 50, "2026-11-18", "\x00", "\x85", "\u2028", "\ufeff", "\t", "health: 0.0.0.0:1",
          "timezone: UTC", "enforcement", "0", "service_tiers: {flex: {input: 1, output: 2}}",
          "endpoints: [{region: us-west-2}]", "127.0.0.1:8080", "-1", "true", "max_output_tokens: 5",
          "alerts: {webhook: {url: https://example.com}}", "secret: hunter2", "%")  # fmt: skip
NAMES = (*tuple(dict.fromkeys(re.findall(r"\w+(?=:)", BASE))), "0", "LABELS", "premium", "no_such", "")
PROBLEM = re.compile(rf"(?:config\.yaml:([1-9][0-9]*)|{ENV_PREFIX}[^:]*): .+|and [0-9]+ more mistakes", re.DOTALL)
WORDS = tuple(text.encode() for text in (*dict.fromkeys(TOKENS), *PIECES, ENV_PREFIX))


def _text(reader: Reader) -> str:
    """The file after a few slips of the hand, of its lines in some order, or anything."""
    how = reader.byte() % 8
    if how == 7:
        return reader.take(reader.number(2) % 2048).decode("utf-8", "replace")
    if how == 6:
        return "".join(_piece(reader) for _ in range(reader.byte() % 32))
    text = BASE
    for _ in range(how):
        start = reader.number(2) % (len(text) + 1)
        text = text[:start] + _piece(reader) + text[start + reader.byte() % 24 :]
    return text


def _piece(reader: Reader) -> str:
    how = reader.byte() % 4
    if how == 3:
        return reader.some().decode("utf-8", "replace")
    return reader.pick((PIECES, TOKENS, LINES)[how])


def _variables(reader: Reader) -> dict[str, str]:
    found = {}
    for _ in range(reader.byte() % 3):
        path = "__".join(reader.pick(NAMES).upper() for _ in range(1 + reader.byte() % 4))
        found[ENV_PREFIX + path] = _piece(reader)
    return found


def one(data: bytes) -> None:
    reader = Reader(data)
    text, environ, which = _text(reader), _variables(reader), reader.byte()
    config = _outcome(text, environ)
    if isinstance(config, Config) and not environ:
        _as_written(text, config)
        _as_variable(text, config, which)


def _outcome(text: str, environ: Mapping[str, str]) -> Config | tuple[str, ...]:
    try:
        return parse_config(text, "config.yaml", environ)
    except ConfigError as refused:
        found = refused.problems
    holds(found, "refused without a word")
    lines = len(re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text))
    for problem in found:
        holds(problem.isprintable(), f"words that are none: {problem!r}")
        place = PROBLEM.fullmatch(problem)
        holds(place, f"no place: {problem!r}")
        assert place is not None
        holds(place[1] is None or int(place[1]) <= lines, f"no such line: {problem!r} of {lines}")
        is_of_another_key = problem.startswith(ENV_PREFIX) and "SECRET" not in problem.partition(":")[0]
        holds("hunter2" not in problem or is_of_another_key, f"a secret is shown: {problem!r}")
    return found


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in _leaves(inner, (*path, str(name)))]
    return [] if isinstance(value, list) else [(path, value)]


def _as_written(text: str, config: Config) -> None:
    """What stands there, by a plain reader of YAML, is what is read."""
    for path, value in _leaves(yaml.load(text, yaml.CSafeLoader)):
        found: Any = config
        for name in path:
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        if type(value) in (int, bool) and type(found) in (int, bool):
            same(found, value, ".".join(path))
        elif isinstance(value, (int, float)) and isinstance(found, (int, float)):
            same(float(found), float(value), ".".join(path))
        elif isinstance(value, str) and isinstance(found, str):
            same(found, value, ".".join(path))


def _as_variable(text: str, config: Config, which: int) -> None:
    leaves = [
        (path, value)
        for path, value in _leaves(yaml.load(text, yaml.CSafeLoader))
        if isinstance(value, (str, int, float))
    ]
    if leaves:
        path, value = leaves[which % len(leaves)]
        spelt = str(value).lower() if isinstance(value, bool) else str(value)
        again = _outcome(text, {ENV_PREFIX + "__".join(path).upper().replace("-", "_"): spelt})
        if isinstance(again, Config):
            same(again, config, f"with {path} as a variable")
        else:
            holds(any("ambiguous" in problem for problem in again), f"{path} as a variable: {again}")
