"""Whatever is written, the configuration loads or says in whole lines why not; and it keeps secrets to itself."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from price_keeper.config.config_sections import ENV_PREFIX, Config, parse_config
from price_keeper.errors import ConfigError

CONFIG_YAML = (Path(__file__).parents[2] / "config.yaml").read_text()
LINES = CONFIG_YAML.splitlines(keepends=True)
DEFAULTS = LINES[LINES.index(next(line for line in LINES if line.startswith("defaults:"))) :]
BOUND_SECS = 20  # far from what it takes, near enough to notice what would never end

Outcome = Config | tuple[str, ...]


def outcome(text: str, environ: Mapping[str, str] | None = None) -> Outcome:
    """The configuration, or its problems, which must be fit to be shown."""
    began = time.monotonic()
    try:
        return parse_config(text, "config.yaml", environ or {})
    except ConfigError as error:
        found = error.problems
    finally:
        assert time.monotonic() - began < BOUND_SECS
    assert found
    assert all(problem and problem.isprintable() for problem in found)  # a line break is not printable
    return found


# --- anything at all --------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *(
            "\n",
            "  ",
            "\t",
            ": ",
            "- ",
            "[",
            "]",
            "{",
            "}",
            ",",
            "#",
            "'",
            '"',
            "|\n",
            ">\n",
            "? ",
            "=",
            "~",
            "null",
            "yes",
        ),
        *("&a ", "*a", "<<: ", "!", "!!int ", "!!set ", "%YAML 1.1\n", "---\n", "...\n", '"\\U99999999"', '"\\ud800"'),
        *(".nan", "-.inf", "1e9999", "0x1F", "1:30", "9" * 5000, "2026-11-18"),
        *("\x00", "\x85", "\u2028", "\ufeff", "é"),
        *LINES,
        *re.findall(r"\w+", CONFIG_YAML),
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """config.yaml after a few slips of the hand."""
    text = CONFIG_YAML
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.integers(0, 40)) if draw(st.booleans()) else start
        text = text[:start] + draw(PIECES | st.text(max_size=20)) + text[end:]
    return text


@st.composite
def lines_lost_and_doubled(draw: st.DrawFn) -> str:
    return "".join(draw(st.lists(st.sampled_from(LINES), max_size=60)))


@given(st.text())
def test_any_text_loads_or_reports_problems(text: str) -> None:
    outcome(text)


@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_yaml_structure_loads_or_reports_problems(text: str) -> None:
    outcome(text)


@given(mutated() | lines_lost_and_doubled())
def test_any_edit_of_valid_file_loads_or_reports_problems(text: str) -> None:
    outcome(text)


NAMES = st.sampled_from(sorted(set(re.findall(r"\w+(?=:)", CONFIG_YAML)))) | st.text(max_size=8)


@given(
    st.dictionaries(
        st.lists(NAMES, max_size=5).map(lambda names: ENV_PREFIX + "__".join(names).upper()),
        st.lists(PIECES, max_size=4).map("".join) | st.text(),
        max_size=5,
    ),
    st.sampled_from([CONFIG_YAML, "", "store: x\nlabels: [1]\nauth:\n"]),
)
def test_any_variables_load_or_report_problems(environ: dict[str, str], text: str) -> None:
    outcome(text, environ)


# --- secrets ----------------------------------------------------------------------------------------------------

SECRETS = st.text(st.sampled_from("abcdefXYZ0189+/=-_.:;!$%&*#@'\"{}[]<>, \n"), min_size=4, max_size=60).map(
    lambda text: f"hunter2{text}hunter2"
)
SECRET_KEYS = ["secret", "secret_env", "admin_api_key", "admin_api_key_env", "private_key", "private_key_env"]
SECRET_KEYS += ["password", "token", "client_secret", "api-key", "credentials", "secret_env ", "private_key_file"]
SECTIONS = ["", "auth", "store", "upstream", "labels", "listen"]
WRAPPED = st.sampled_from(["{0}", "[{0}]", "{{a: {0}}}", "{{kid: k, alg: HS256, secret: {0}}}", "[[{0}], {0}]"])


def quoted(secret: str) -> list[str]:
    """As someone may write it: well, in haste, and wrongly."""
    return [
        json.dumps(secret),
        "'" + secret.replace("'", "''") + "'",
        secret,
        f"*{secret}",
        f"!{secret} x",
        f"&{secret}",
    ]


@given(SECRETS, st.sampled_from(SECRET_KEYS), st.sampled_from(SECTIONS), WRAPPED, st.integers(0, 5), st.booleans())
@example("hunter2", "admin_api_key_env", "auth", "{0}", 0, True)
def test_secret_in_file_is_never_shown(
    secret: str, key: str, section: str, wrapped: str, how: int, in_keys: bool
) -> None:
    entry = f"{key}: {wrapped.format(quoted(secret)[how])}"
    lines = [f"{section}:", f"  {entry}"] if section else [entry]
    if in_keys:
        lines = ["auth:", "  keys:", "  - kid: a", "    alg: HS256", f"    {entry}"]
    keeps_to_itself(outcome("\n".join(lines) + "\n" + "".join(DEFAULTS)), secret)


@given(SECRETS, st.sampled_from(["AUTH", "AUTH__KEYS", "AUTH__SECRET", "AUTH__ADMIN_API_KEY", "AUTH__KEYS__0__SECRET"]))
def test_secret_in_variable_is_never_shown(secret: str, path: str) -> None:
    keeps_to_itself(outcome(CONFIG_YAML, {ENV_PREFIX + path: json.dumps(secret)}), secret)


@given(SECRETS, st.sampled_from(["upstream", "store"]))
def test_secret_in_url_is_never_shown(secret: str, section: str) -> None:
    text = json.dumps(f"https://user:{secret}@host")
    keeps_to_itself(outcome(f"{section}: {{endpoint: {text}}}"), secret)


def keeps_to_itself(found: Outcome, secret: str) -> None:
    assert not isinstance(found, Config)
    assert not any("hunter2" in problem for problem in found)


# --- overrides --------------------------------------------------------------------------------------------------

# Right values of each key; text stands in quotes in the file, and without them in a variable.
TEXTS: dict[tuple[str, ...], list[str]] = {
    ("listen", "data"): ["127.0.0.1:0", "[::1]:1", "0.0.0.0:80"],
    ("listen", "health"): ["127.0.0.1:8080", ""],
    ("upstream", "region"): ["eu-central-1"],
    ("upstream", "endpoint"): ["simulated", "https://h:1"],
    ("store", "engine"): ["dynamodb"],
    ("store", "path"): ["x: y", "5", "null", "é", " # "],
    ("auth", "mode"): ["identity", "required"],
    ("auth", "keys", "0", "kid"): ["k2"],
    ("on_store_down",): ["refuse"],
    ("labels", "premium", "model"): ["m:0", "amazon.nova-lite-v1:0"],
    ("labels", "economy", "price_source"): ["config"],
    ("defaults", "timezone"): ["Europe/Berlin"],
}
OTHERS: dict[tuple[str, ...], list[str]] = {
    ("listen", "request_memory_mib"): ["32", "512", "null"],
    ("journal", "flush_interval_secs"): ["0.5", "2", "1e1", "20"],
    ("journal", "fsync_interval_ms"): ["10"],
    ("journal", "max_unflushed_usd"): ["2.50"],
    ("auth", "max_sessions"): ["0", "10"],
    ("auth", "access_seconds"): ["60", "7200"],
    ("auth", "refresh_seconds"): ["90000", "86400"],
    ("auth", "revocation_grace_seconds"): ["0", "60"],
    ("labels", "standard", "prices_usd_per_1m", "input"): ["3", "0.25", "0.0000001"],
    ("labels", "economy", "prices_usd_per_1m", "service_tiers"): ["{flex: {input: 1, output: 2}}", "{}"],
    ("labels", "economy", "prices_usd_per_1m", "long_context"): [
        "null",
        "{above_input_tokens: 200000, input: 1, output: 2}",
    ],
    ("defaults", "refresh_interval_tight_secs"): ["59", "301"],
    ("default_price",): ["null", "{input: 1, output: 1, cache_read: 1, cache_write_5m: 1, cache_write_1h: 1}"],
    ("auth", "identity"): ["null", "", "{org: 6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b, app: b}"],
    ("auth", "keys"): ["[{kid: a, alg: HS256, secret_env: A}]", "[{kid: a, alg: EdDSA, public_key_file: a}]"],
}
OPTIONAL = {("listen", "health"), ("upstream", "endpoint")}
WRONG = ["", "null", "5", "-1", "x", "true", "'1'", "[1]", "{}", "{a: b}", "010", "{5: 6}"]


@given(st.data())
def test_variable_is_equivalent_to_file(data: st.DataObject) -> None:
    right = TEXTS | OTHERS
    changed = data.draw(st.lists(st.sampled_from(sorted(right)), min_size=1, max_size=4, unique=True))
    tree = yaml.safe_load(CONFIG_YAML)
    environ = {}
    for path in sorted(changed, key=len):  # as variables do: a section before the keys in it
        value = data.draw(st.sampled_from(right[path] * 3 + WRONG), label=".".join(path))
        is_quoted = path in TEXTS and not (path in OPTIONAL and value == "")
        if not put(tree, path, json.dumps(value) if is_quoted else value):
            return  # another change took away what this one is a part of
        environ[ENV_PREFIX + "__".join(path).upper()] = value
    assert without_locations(outcome(CONFIG_YAML, environ)) == without_locations(outcome(written(tree)))


def put(tree: Any, path: tuple[str, ...], value: str) -> bool:
    for name in path[:-1]:
        tree = tree[int(name) if isinstance(tree, list) else name]
        if isinstance(tree, Raw):
            return False
    tree[path[-1]] = Raw(value)
    return True


class Raw(str):
    """A value that is already YAML."""


def written(tree: Any) -> str:
    """As flow YAML, which takes raw values as they are."""
    if isinstance(tree, Raw):
        return str(tree)
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(written, tree)) + "]"
    return json.dumps(tree)


def without_locations(found: Outcome) -> Config | set[str]:
    return found if isinstance(found, Config) else {problem.split(": ", 1)[1] for problem in found}
