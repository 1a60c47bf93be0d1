"""What commands ask of the control API, and what they say when it does not do it."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.commands.places import NotAsked
from proxy.config.checks import url as url_complaint
from proxy.errors import PriceKeeperError

API_VARIABLE = "PRICE_KEEPER_API_URL"
USUAL_API = "http://127.0.0.1:8081"
SECONDS = 30.0  # more than the slowest answer takes: a login that goes on losing to others
MOST_BYTES = 1024 * 1024  # of an answer; a pair of tokens has a few thousand
_PRINTABLE = re.compile(r"[!-~]{1,4096}")


class Refused(PriceKeeperError):
    """It answered, and did not do it. `wait` is for how many seconds trying again is of no use."""

    def __init__(self, status: int, message: str, wait: int | None) -> None:
        self.status = status
        self.wait = wait
        super().__init__(message)


def add_api(parser: ArgumentParser) -> None:
    text = f"where the control API listens; default: the variable {API_VARIABLE}, or {USUAL_API}"
    parser.add_argument("--api", metavar="URL", help=text)


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
        raise NotAsked(f"{source}: {what} is printable ASCII without spaces")
    return text


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as failure:
        raise NotAsked(f"cannot read {file}: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise NotAsked(f"{file} holds no text") from None


class Api:
    """One answer for one request; it follows no redirection and asks no proxy, which would see what is secret."""

    def __init__(self, given: str | None) -> None:
        source = "--api" if given is not None else API_VARIABLE
        self.url = (given if given is not None else os.environ.get(API_VARIABLE) or USUAL_API).rstrip("/")
        complaint = url_complaint(self.url)
        if complaint:
            raise NotAsked(f"{source}: {complaint}")

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Raises Refused, or PriceKeeperError when there is no answer."""
        status, wait, answer = self._exchanged(method, path, body, headers or {})
        try:
            told = json.loads(answer)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise PriceKeeperError(
                f"{self.url} is no control API of Bedrock Price Keeper: its answer is no JSON object"
            )
        if status in (200, 201):
            return told
        raise Refused(status, self._why(status, told, wait), wait)

    def _exchanged(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[int, int | None, bytes]:
        connection = self._connection()
        sent = None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        is_connected = False
        try:
            connection.connect()
            is_connected = True
            connection.request(method, path, sent, {**kind, **headers, "Accept": "application/json"})
            answer = connection.getresponse()
            waits = answer.headers.get("Retry-After", "")
            return answer.status, int(waits) if waits.isdecimal() else None, answer.read(MOST_BYTES)
        except ssl.SSLError as failure:
            why = getattr(failure, "verify_message", None) or failure.reason or "no TLS"
            raise PriceKeeperError(f"{self.url}: {why}") from None
        except (OSError, http.client.HTTPException) as failure:
            raise PriceKeeperError(self._unanswered(failure, method, is_connected)) from None
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
                f"Say where the control API listens by --api or {API_VARIABLE}"
            )
        perhaps = "" if method == "GET" else "; it may have been done all the same"
        return f"{self.url} gave no whole answer ({type(failure).__name__}){perhaps}"

    def _why(self, status: int, told: Mapping[str, Any], wait: int | None) -> str:
        text = str(told.get("message", "no reason is given"))
        details = told.get("details")
        for each in details if isinstance(details, list) else []:
            if isinstance(each, dict):
                text += f"; {each.get('path')}: {each.get('message')}"
        again = "" if wait is None else f"; try again in {wait} s"
        return f"{self.url} answered {status}: {text}{again}"
