"""The format of the log: one line of text or JSON for each record.

Everything that cannot be printed is escaped, so that text from callers can neither start a line nor control a
terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from price_keeper.config.config_problems import escape_line
from price_keeper.errors import StoreError
from price_keeper.telemetry.incident import Incident

ROOT_LOGGER: Final = "price_keeper"
store_reads: Final = Incident(logging.getLogger("price_keeper.selection"), time.monotonic)  # of settings and budgets
_INDENT: Final = "    "  # before the further lines of a record, so that none of them looks like another record

# Attributes of a record beside its message; see `build_request_extra`.
_REQUEST, _ANSWER, _WHERE, _WORKER = "request_id", "bedrock_request_id", "where", "worker"


def build_request_extra(request_id: str, failure: BaseException | None = None) -> dict[str, str]:
    """The `extra` of a record about a request: the request's id, and the traceback of its failure. The exception's
    message is left out, because it may contain data of the caller."""
    if failure is None:
        return {_REQUEST: request_id}
    return {_REQUEST: request_id, _WHERE: format_traceback(failure)}


def build_bedrock_extra(bedrock_request_id: str) -> dict[str, str]:
    """The `extra` of a record about a response of Bedrock: its request id, which the caller received too."""
    return {_ANSWER: bedrock_request_id}


def log_read_failure(log: logging.Logger, subject: str, effect: str, failure: Exception) -> None:
    """Log that a read of the store failed, and what holds meanwhile. A store that does not answer is one incident for
    all that is read from it; the rest is logged at level INFO. Any failure but a StoreError is an error of ours: it is
    logged with its traceback, and without its message, which may contain data of a caller."""
    if isinstance(failure, StoreError):
        message = "%s cannot be read from the store; %s until it answers: %s"
        if not store_reads.report(message, subject, effect, failure):
            log.info(message, subject, effect, failure)
        return
    message = "%s cannot be read because of an error of ours (%s); %s until a read succeeds"
    log.error(message, subject, type(failure).__name__, effect, extra={_WHERE: format_traceback(failure)})


def format_traceback(failure: BaseException) -> str:
    return "".join(traceback.format_tb(failure.__traceback__))


def configure_logging(
    log_format: Literal["text", "json"], level: str = "warning", stream: TextIO | None = None
) -> logging.Handler:
    """Configure logging for the whole process. `stream` is standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(_is_loggable)
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger(ROOT_LOGGER).setLevel(level.upper())
    return handler


def tag_worker(number: int) -> None:
    """Add the worker's number to all further records of this process."""
    make = logging.getLogRecordFactory()

    def make_tagged(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        setattr(record, _WORKER, number)
        return record

    logging.setLogRecordFactory(make_tagged)


def _is_loggable(record: logging.LogRecord) -> bool:
    """Drop records of libraries below WARNING: they contain what is sent and received, including headers with
    tokens."""
    return record.levelno >= logging.WARNING or f"{record.name}.".startswith(f"{ROOT_LOGGER}.")


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        worker = getattr(record, _WORKER, None)
        by = record.name if worker is None else f"{record.name} worker {worker}"
        first = f"{_format_time(record)} {record.levelname} {by}: {escape_line(record.getMessage())}"
        return "\n".join([first, *(f"{_INDENT}{escape_line(line)}" for line in _format_cause(record).splitlines())])


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": escape_line(record.getMessage()),
        }
        for name in (_REQUEST, _ANSWER, _WORKER):
            if hasattr(record, name):
                fields[name] = getattr(record, name)
        cause = _format_cause(record)
        if cause:
            fields["cause"] = [escape_line(line) for line in cause.splitlines()]
        return json.dumps(fields)


def _format_time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _format_cause(record: logging.LogRecord) -> str:
    text: str = getattr(record, _WHERE, "")
    if record.exc_info and record.exc_info[0] is not None:
        text += "".join(traceback.format_exception(*record.exc_info))
    return text
