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

from price_keeper.cli.output import CommandError
from price_keeper.cli.shared_arguments import API_URL_VARIABLE, DEFAULT_API_URL
from price_keeper.config.checks import control_url as url_complaint
from price_keeper.config.problems import escape_line
from price_keeper.control.terms import MAX_BODY_BYTES as MOST_SENT
from price_keeper.errors import PriceKeeperError

RESPONSE_TIMEOUT_SECONDS = 30.0  # more than the slowest answer takes to begin: a login that goes on losing to others
REQUEST_DEADLINE_SECONDS = 120.0  # until it has ended, however it drips
MAX_RESPONSE_BYTES = (
    64 * 1024 * 1024
)  # of an answer; a hundred orgs with a quota for each of a thousand labels have a third
MAX_REASON_CHARACTERS = 2000  # characters of why something was not done
_SECRET_PATTERN = re.compile(r"[ -~]{1,4096}")
_VISIBLE_PATTERN = re.compile(r"[!-~]+")


class ApiRefusal(PriceKeeperError):
    """It answered, and did not do it. `wait` is for how many seconds trying again is of no use; `details` are the paths
    of mistakes, and what is wrong there; without a path, with all of it."""

    def __init__(
        self, status: int, message: str, retry_after: int | None = None, details: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        self.retry_after = retry_after
        self.details = details
        super().__init__(message)


class ApiOutcomeUnknown(PriceKeeperError):
    """What was asked for may have been done all the same."""


@contextmanager
def check_response_shape(source: str) -> Iterator[None]:
    """Around whatever looks into an answer, which may be of another version, or of another service altogether."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as failure:
        raise PriceKeeperError(f"{source} answered what cannot be read here ({type(failure).__name__})") from None


def read_visible_text(response: Mapping[str, Any], name: str, source: str) -> str:
    """A token, a secret or an id, of an answer: it goes to a terminal, or to a program, as it is."""
    text = response.get(name)
    if not isinstance(text, str) or not _VISIBLE_PATTERN.fullmatch(text):
        raise PriceKeeperError(f"{source} answered no {name} of printable ASCII without spaces")
    return text


def read_secret(file: Path | None, variable: str, description: str) -> str | None:
    """From the file, if there is one, else from the variable; None where neither says anything."""
    text = os.environ.get(variable, "") if file is None else _read_secret_file(file)
    text = text.strip()
    if not text and file is None:
        return None
    return validate_secret(text, str(file or variable), description)


def validate_secret(text: str, source: str, description: str) -> str:
    """What is found is not told: it may be a piece of a secret."""
    if not _SECRET_PATTERN.fullmatch(text):
        raise CommandError(f"{source}: {description} is printable ASCII, on one line")
    return text


def _read_secret_file(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as failure:
        raise CommandError(f"cannot read {file}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{file} holds no text") from None


class ControlApiClient:
    """One answer for one request; it follows no redirection and asks no proxy, which would see what is secret."""

    def __init__(self, url: str | None) -> None:
        source = "--api" if url is not None else API_URL_VARIABLE
        self.bytes_read = 0
        self.url = (url if url is not None else os.environ.get(API_URL_VARIABLE) or DEFAULT_API_URL).rstrip("/")
        complaint = url_complaint(self.url)
        if complaint:
            raise CommandError(f"{source}: {complaint}")

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Raises Refused, Unanswered, or PriceKeeperError when nobody is there."""
        return self.request_with_status(method, path, body, headers)[1]

    def request_with_status(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """As `ask`, with the status."""
        status, retry_after, content = self._exchange(method, path, body, headers or {})
        try:
            response = json.loads(content)
        except (ValueError, RecursionError):
            response = None
        if not isinstance(response, dict):
            raise PriceKeeperError(
                f"{self.url} is no control API of Bedrock Price Keeper: its answer is no JSON object"
            )
        if status in (200, 201):
            return status, response
        text = str(response.get("message", "no reason is given"))
        details = tuple(_iterate_details(response))
        raise ApiRefusal(
            status, self._describe_refusal(status, text, details, retry_after), retry_after, details or (("", text),)
        )

    def _exchange(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, int | None, bytes]:
        connection = self._create_connection()
        payload = None if body is None else _encode_body(body)
        content_type = {} if body is None else {"Content-Type": "application/json"}
        is_connected = False
        try:
            connection.connect()
            is_connected = True
            with _limit_duration(connection.sock):
                connection.request(method, path, payload, {**content_type, **headers, "Accept": "application/json"})
                response = connection.getresponse()
                content = response.read(MAX_RESPONSE_BYTES)
            self.bytes_read += len(content)
            return response.status, _parse_retry_after(response.headers.get("Retry-After", "")), content
        except ssl.SSLError as failure:
            reason = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
            raise PriceKeeperError(f"{self.url}: {reason}") from None
        except (OSError, http.client.HTTPException) as failure:
            error_type = ApiOutcomeUnknown if is_connected else PriceKeeperError
            raise error_type(self._describe_no_answer(failure, method, is_connected)) from None
        finally:
            connection.close()

    def _create_connection(self) -> http.client.HTTPConnection:
        scheme, _, host = self.url.partition("://")
        connection_type = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return connection_type(host, timeout=RESPONSE_TIMEOUT_SECONDS)

    def _describe_no_answer(self, failure: Exception, method: str, is_connected: bool) -> str:
        if not is_connected:
            reason = getattr(failure, "strerror", None) or "no answer"
            return (
                f"nobody answers at {self.url} ({reason}): is price-keeper running there? "
                f"Say where the control API listens by --api or {API_URL_VARIABLE}"
            )
        caveat = "" if method == "GET" else "; it may have been done all the same"
        return f"{self.url} gave no whole answer ({type(failure).__name__}){caveat}"

    def _describe_refusal(
        self, status: int, text: str, details: tuple[tuple[str, str], ...], retry_after: int | None
    ) -> str:
        mistakes = "".join(f"; {path}: {message}" if path else f"; {message}" for path, message in details)
        advice = "" if retry_after is None else f"; try again in {retry_after} s"
        return escape_line(f"{self.url} answered {status}: {text}{mistakes}")[:MAX_REASON_CHARACTERS] + advice


@contextmanager
def _limit_duration(connection: socket.socket) -> Iterator[None]:
    """Raises TimeoutError, or whatever comes of it that nothing more is heard."""
    is_expired = threading.Event()

    def shut_down() -> None:
        is_expired.set()
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, which would wait for the other side

    timer = threading.Timer(REQUEST_DEADLINE_SECONDS, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if is_expired.is_set():
        raise TimeoutError


def _parse_retry_after(header: str) -> int | None:
    return int(header) if re.fullmatch(r"[0-9]{1,6}", header) else None


def _iterate_details(response: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    details = response.get("details")
    for each in details if isinstance(details, list) else []:
        if isinstance(each, dict):
            yield str(each.get("path", "")), str(each.get("message", ""))


def _encode_body(body: Any) -> bytes:
    """Raises NotAsked: of a body that is too long the API reads nothing, and may not get to say so."""
    encoded = json.dumps(body, allow_nan=False).encode()
    if len(encoded) > MOST_SENT:
        raise CommandError(f"that is too much: {len(encoded)} bytes of JSON, where the control API takes {MOST_SENT}")
    return encoded
