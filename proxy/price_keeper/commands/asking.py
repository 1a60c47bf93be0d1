"""What commands ask of the control API, and what they say when it does not do it."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from price_keeper.commandline.options import API_URL_VARIABLE, DEFAULT_API_URL
from price_keeper.commands.shared import CommandError
from price_keeper.config.checks import control_url as url_complaint
from price_keeper.config.problems import escape_line
from price_keeper.control.terms import MAX_BODY_BYTES as MOST_SENT
from price_keeper.errors import PriceKeeperError

SECONDS = 30.0  # more than the slowest answer takes to begin: a login that goes on losing to others
WHOLE_SECONDS = 120.0  # until it has ended, however it drips
MOST_BYTES = 64 * 1024 * 1024  # of an answer; a hundred orgs with a quota for each of a thousand labels have a third
MOST_TOLD = 2000  # characters of why something was not done
_PRINTABLE = re.compile(r"[ -~]{1,4096}")
_VISIBLE = re.compile(r"[!-~]+")


class Refused(PriceKeeperError):
    """It answered, and did not do it. `wait` is for how many seconds trying again is of no use; `details` are the paths
    of mistakes, and what is wrong there; without a path, with all of it."""

    def __init__(
        self, status: int, message: str, wait: int | None = None, details: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        self.wait = wait
        self.details = details
        super().__init__(message)


class Unanswered(PriceKeeperError):
    """What was asked for may have been done all the same."""


@contextmanager
def readable(whose: str) -> Iterator[None]:
    """Around whatever looks into an answer, which may be of another version, or of another service altogether."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as failure:
        raise PriceKeeperError(f"{whose} answered what cannot be read here ({type(failure).__name__})") from None


def visible(told: Mapping[str, Any], name: str, whose: str) -> str:
    """A token, a secret or an id, of an answer: it goes to a terminal, or to a program, as it is."""
    text = told.get(name)
    if not isinstance(text, str) or not _VISIBLE.fullmatch(text):
        raise PriceKeeperError(f"{whose} answered no {name} of printable ASCII without spaces")
    return text


def secret_of(file: Path | None, variable: str, what: str) -> str | None:
    """From the file, if there is one, else from the variable; None where neither says anything."""
    text = os.environ.get(variable, "") if file is None else _read(file)
    text = text.strip()
    if not text and file is None:
        return None
    return checked(text, str(file or variable), what)


def checked(text: str, source: str, what: str) -> str:
    """What is found is not told: it may be a piece of a secret."""
    if not _PRINTABLE.fullmatch(text):
        raise CommandError(f"{source}: {what} is printable ASCII, on one line")
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as failure:
        raise CommandError(f"cannot read {file}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{file} holds no text") from None


class Api:
    """One answer for one request; it follows no redirection and asks no proxy, which would see what is secret."""

    def __init__(self, given: str | None) -> None:
        source = "--api" if given is not None else API_URL_VARIABLE
        self.bytes_read = 0
        self.url = (given if given is not None else os.environ.get(API_URL_VARIABLE) or DEFAULT_API_URL).rstrip("/")
        complaint = url_complaint(self.url)
        if complaint:
            raise CommandError(f"{source}: {complaint}")

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Raises Refused, Unanswered, or PriceKeeperError when nobody is there."""
        return self.exchange(method, path, body, headers)[1]

    def exchange(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """As `ask`, with the status."""
        status, wait, answer = self._exchanged(method, path, body, headers or {})
        try:
            told = json.loads(answer)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise PriceKeeperError(
                f"{self.url} is no control API of Bedrock Price Keeper: its answer is no JSON object"
            )
        if status in (200, 201):
            return status, told
        text = str(told.get("message", "no reason is given"))
        details = tuple(_details(told))
        raise Refused(status, self._why(status, text, details, wait), wait, details or (("", text),))

    def _exchanged(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[int, int | None, bytes]:
        connection = self._connection()
        sent = None if body is None else _sent(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        is_connected = False
        try:
            connection.connect()
            is_connected = True
            with _in_time(connection.sock):
                connection.request(method, path, sent, {**kind, **headers, "Accept": "application/json"})
                answer = connection.getresponse()
                body_read = answer.read(MOST_BYTES)
            self.bytes_read += len(body_read)
            return answer.status, _wait(answer.headers.get("Retry-After", "")), body_read
        except ssl.SSLError as failure:
            why = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
            raise PriceKeeperError(f"{self.url}: {why}") from None
        except (OSError, http.client.HTTPException) as failure:
            kind_of = Unanswered if is_connected else PriceKeeperError
            raise kind_of(self._unanswered(failure, method, is_connected)) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        scheme, _, place = self.url.partition("://")
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(place, timeout=SECONDS)

    def _unanswered(self, failure: Exception, method: str, is_connected: bool) -> str:
        if not is_connected:
            why = getattr(failure, "strerror", None) or "no answer"
            return (
                f"nobody answers at {self.url} ({why}): is price-keeper running there? "
                f"Say where the control API listens by --api or {API_URL_VARIABLE}"
            )
        perhaps = "" if method == "GET" else "; it may have been done all the same"
        return f"{self.url} gave no whole answer ({type(failure).__name__}){perhaps}"

    def _why(self, status: int, text: str, details: tuple[tuple[str, str], ...], wait: int | None) -> str:
        where = "".join(f"; {path}: {message}" if path else f"; {message}" for path, message in details)
        again = "" if wait is None else f"; try again in {wait} s"
        return escape_line(f"{self.url} answered {status}: {text}{where}")[:MOST_TOLD] + again


@contextmanager
def _in_time(connected: socket.socket) -> Iterator[None]:
    """Raises TimeoutError, or whatever comes of it that nothing more is heard."""
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        with suppress(OSError):
            socket.socket.shutdown(connected, socket.SHUT_RDWR)  # below TLS, which would wait for the other side

    timer = threading.Timer(WHOLE_SECONDS, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_late.is_set():
        raise TimeoutError


def _wait(header: str) -> int | None:
    return int(header) if re.fullmatch(r"[0-9]{1,6}", header) else None


def _details(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    found = told.get("details")
    for each in found if isinstance(found, list) else []:
        if isinstance(each, dict):
            yield str(each.get("path", "")), str(each.get("message", ""))


def _sent(body: Any) -> bytes:
    """Raises NotAsked: of a body that is too long the API reads nothing, and may not get to say so."""
    sent = json.dumps(body, allow_nan=False).encode()
    if len(sent) > MOST_SENT:
        raise CommandError(f"that is too much: {len(sent)} bytes of JSON, where the control API takes {MOST_SENT}")
    return sent
