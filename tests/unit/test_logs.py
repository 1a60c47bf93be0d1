"""How records are written: one printable line each, whatever names callers choose."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.errors import StoreError
from price_keeper.local_responses import send_error
from price_keeper.telemetry import logs

from tests.support.fake_control_service import KEY

Form = Literal["text", "json"]
FORMS: list[Form] = ["text", "json"]
_FIRST = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) [a-z_.0-9 ]+: ")

# Line breaks of every kind, an escape that clears a terminal, one that ends a line of JSON, and a change of direction.
HOSTILE = (
    "a\nb",
    "a\r\nb",
    "\x1b[2J\x1b]0;title\x07",
    '"}\n{"level": "error"',
    "\x00\x08\x7f\x9b31m",
    "\u2028\u2029\x85\u202e\ufeff",
    "\ud800",
)


@contextmanager
def logging_to(form: Form, level: str = "debug") -> Iterator[io.StringIO]:
    """As `serve` sets it up; afterwards all is as it was before."""
    root, own, make = logging.getLogger(), logging.getLogger(logs.ROOT_LOGGER), logging.getLogRecordFactory()
    before, levels, written = root.handlers[:], (root.level, own.level), io.StringIO()
    root.handlers[:] = []  # setting it up closes those that are there
    try:
        logs.configure_logging(form, level, written)
        yield written
    finally:
        root.handlers[:] = before
        root.setLevel(levels[0])
        own.setLevel(levels[1])
        logging.setLogRecordFactory(make)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HOSTILE)
def test_log_line_with_hostile_name_stays_one_printable_line(form: Form, name: str) -> None:
    with logging_to(form) as written:
        logging.getLogger("price_keeper.some").warning("%s is not good: %r", name, name)
        logging.getLogger("price_keeper.some").warning(name)
    lines = written.getvalue().split("\n")
    assert (len(lines), lines[-1]) == (3, "")
    assert all(line.isprintable() for line in lines)
    for line in lines[:2]:
        assert _FIRST.match(line) if form == "text" else json.loads(line)["level"] == "warning"


@given(st.text(), st.sampled_from(FORMS))
def test_record_is_one_printable_line(text: str, form: Form) -> None:
    formatter: logging.Formatter = logs.TextFormatter() if form == "text" else logs.JsonFormatter()
    line = formatter.format(_record(text))
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["message"].isprintable()


def _record(text: str, **more: Any) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "price_keeper.some", "levelno": 30, "levelname": "WARNING", "msg": text, **more}
    )


def test_traceback_is_indented_below_its_line() -> None:
    try:
        raise ValueError("2026-11-19T00:00:00.000Z ERROR price_keeper.auth: forged\nas is this\x1b[0m")
    except ValueError as failure:
        record = _record("it broke", exc_info=(ValueError, failure, failure.__traceback__))
    first, *below = logs.TextFormatter().format(record).split("\n")
    assert first.endswith("WARNING price_keeper.some: it broke")
    assert below[-1].strip() == r"as is this\x1b[0m"
    assert all(line.startswith("    ") and line.isprintable() for line in below)
    document = json.loads(logs.JsonFormatter().format(record))
    assert document["cause"][-1] == r"as is this\x1b[0m"
    assert all(line.isprintable() for line in document["cause"])


def test_failed_request_is_logged_by_id_and_place() -> None:
    class Responder:
        has_started = True
        aborted = 0

        def abort(self) -> None:
            self.aborted += 1

    responder, sent = cast(Any, Responder()), "what the caller sent"
    with logging_to("json") as written:
        try:
            raise KeyError(sent)
        except KeyError as failure:
            refusal = send_error(responder, [(b"x-price-keeper-request-id", b"f00d-7")], failure)
    (document,) = map(json.loads, written.getvalue().splitlines())
    assert (document["request_id"], document["message"]) == ("f00d-7", "request f00d-7 failed: KeyError")
    assert "test_logs.py" in document["cause"][0]
    assert sent not in written.getvalue()
    assert (refusal.status, responder.aborted) == (500, 1)


def test_failed_read_of_store_is_a_warning_and_an_error_of_ours_has_its_place(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("price_keeper.selection")
    for failure in (StoreError("no route"), KeyError("a prompt")):
        try:
            raise failure
        except Exception as caught:
            logs.log_read_failure(log, "the limits", "the last known ones apply", caught)
    away, ours = caplog.records
    assert away.getMessage() == (
        "the limits cannot be read from the store; the last known ones apply until it answers: no route"
    )
    assert (away.levelno, ours.levelno) == (logging.WARNING, logging.ERROR)
    assert "error of ours (KeyError)" in ours.getMessage()
    assert "test_logs.py" in vars(ours)["where"]
    assert "a prompt" not in logs.TextFormatter().format(ours)


def test_json_record_has_every_field() -> None:
    record = _record("told", request_id="1-2", bedrock_request_id="b-3", worker=4, created=1_795_003_200.25)
    assert json.loads(logs.JsonFormatter().format(record)) == {
        "time": "2026-11-18T12:00:00.250Z",
        "level": "warning",
        "logger": "price_keeper.some",
        "message": "told",
        "request_id": "1-2",
        "bedrock_request_id": "b-3",
        "worker": 4,
    }


@pytest.mark.parametrize("form", FORMS)
def test_libraries_log_from_warning_level(form: Form) -> None:
    """At lower levels some libraries log what they send: hpack every header, with tokens in them."""
    with logging_to(form, "debug") as written:
        for name in ("hpack.hpack", "urllib3.connectionpool", "opentelemetry.exporter", "asyncio", "price_keeperish"):
            logging.getLogger(name).setLevel(logging.DEBUG)
            logging.getLogger(name).info("Decoded (authorization, Bearer %s)", KEY)
            logging.getLogger(name).warning("%s is in trouble", name)
            logging.getLogger(name).setLevel(logging.NOTSET)
        logging.getLogger("price_keeper.auth").debug("heard")
    assert KEY not in written.getvalue()
    assert written.getvalue().count("is in trouble") == 5
    assert "heard" in written.getvalue()


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_log_level_is_applied(level: str, heard: int) -> None:
    with logging_to("json", level) as written:
        for tell in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("price_keeper.some").log(tell, "x")
    assert len(written.getvalue().splitlines()) == heard


def test_worker_logs_its_number() -> None:
    with logging_to("text") as written:
        logs.tag_worker(3)
        logging.getLogger("price_keeper.some").warning("told")
    assert written.getvalue().endswith(" WARNING price_keeper.some worker 3: told\n")
