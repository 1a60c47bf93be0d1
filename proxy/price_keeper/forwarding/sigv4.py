"""Signature Version 4, over exactly what is sent.

Everything that stays the same for a day (the signing key) or for a second (the time stamp, and of the calls of one
kind all but the body's hash) is kept between calls, so that a signature costs one hash and one HMAC of a short text.
"""

from __future__ import annotations

import hmac
import re
from binascii import hexlify
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from time import gmtime, strftime
from typing import Final, NamedTuple
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_BLOCK_BYTES: Final = 64  # of SHA-256
_INNER_PAD, _OUTER_PAD = (bytes(code ^ pad for code in range(256)) for pad in (0x36, 0x5C))
_NO_WORDS: Final = "a method, a host and a body's hash are printable ASCII without spaces"
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_SCOPE_PART: Final = re.compile(r"[a-z0-9-]+")
_DOT_OR_EMPTY_SEGMENT: Final = re.compile(r"/\.{0,2}/|/\.{1,2}\Z")
_LONE_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OWN_HEADERS: Final = frozenset({"host", "authorization", "x-amz-date", "x-amz-security-token"})

# The paths that recur, every label with every operation. One is some 6 kB at most, so they cannot grow past 5 MB.
_PATHS_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # The values themselves must not get into a log by way of the message.
        if not (self.access_key and _is_word(self.access_key) and self.secret_key and _is_word(self.secret_key)):
            raise ValueError("an access key and its secret are printable ASCII without spaces")
        if self.token is not None and not _is_word(self.token):
            raise ValueError("a session token is printable ASCII without spaces")


class _Day:
    """What one set of credentials signs with from one midnight UTC to the next."""

    __slots__ = ("_inner", "_outer", "credentials", "date", "scope", "token_line")

    def __init__(self, credentials: AwsCredentials, date: str, region: str, service: str) -> None:
        self.credentials = credentials
        self.date = date
        self.scope = f"{date}/{region}/{service}/aws4_request"
        self.token_line = "" if credentials.token is None else f"x-amz-security-token:{credentials.token}\n"
        key = f"AWS4{credentials.secret_key}".encode()
        for part in (date, region, service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        # HMAC's two halves (RFC 2104) with the key in them already: that is half of its work, and the same all day.
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self._inner, self._outer = sha256(padded.translate(_INNER_PAD)), sha256(padded.translate(_OUTER_PAD))

    def signature(self, to_sign: bytes, canonical_request: bytes) -> bytes:
        """`to_sign` is what stands before the hash of the request."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(to_sign + hexlify(sha256(canonical_request).digest()))
        outer.update(inner.digest())
        return hexlify(outer.digest())


class _Kind(NamedTuple):
    """Of calls in one second, all that is the same."""

    day: _Day
    to_sign: bytes
    canonical: bytes  # up to the body's hash
    before: bytes  # the signature, in what is sent
    after: bytes


class Signer:
    def __init__(self, region: str, service: str = "bedrock") -> None:
        for part in (region, service):
            if not _SCOPE_PART.fullmatch(part):
                raise ValueError(f"a region or service is lower-case letters, digits and '-', not {part!r}")
        self._region = region
        self._service = service
        # One of each is enough: all calls share the clock, and credentials stay the same object until they are renewed.
        self._now: tuple[int, str] = (0, "19700101T000000Z")
        self._day: _Day | None = None
        self._kinds: dict[tuple[str, str, str, str | None], _Kind] = {}  # with a content type alone, or with nothing
        self._kinds_are: tuple[int, AwsCredentials | None] = (0, None)  # for this second, and these credentials

    def sign(
        self,
        credentials: AwsCredentials,
        method: str,
        path: str,
        query: str,
        host: str,
        headers: Sequence[tuple[str, str]],
        body_sha256: str,
        at: float,
    ) -> bytes:
        """The header lines that make this request valid at the given epoch, each ending in CRLF.

        `path` and `host` are as they stand on the wire; `query` is without its question mark, and what is sent has to
        mean the same (`canonical_query` is a safe choice). `headers` are those to sign beside the signer's own, with
        names in lower case; a single content-type is the quick way.
        """
        second, is_quick = int(at), not query and body_sha256.isalnum()
        if is_quick and (not headers or (len(headers) == 1 and headers[0][0] == "content-type")):
            kind = self._kind_of(credentials, method, path, host, headers[0][1] if headers else None, second)
        else:
            if not _is_word(body_sha256):
                raise ValueError(_NO_WORDS)
            kind = self._made(credentials, method, path, query, host, headers, second)
        signature = kind.day.signature(kind.to_sign, kind.canonical + body_sha256.encode("ascii"))
        return kind.before + signature + kind.after

    def _kind_of(
        self, credentials: AwsCredentials, method: str, path: str, host: str, content_type: str | None, second: int
    ) -> _Kind:
        of = self._kinds_are
        if of[0] != second or of[1] is not credentials or len(self._kinds) > _PATHS_REMEMBERED:
            self._kinds, self._kinds_are = {}, (second, credentials)
        key = (method, path, host, content_type)
        kind = self._kinds.get(key)
        if kind is None:
            headers = () if content_type is None else (("content-type", content_type),)
            kind = self._kinds[key] = self._made(credentials, method, path, "", host, headers, second)
        return kind

    def _made(
        self,
        credentials: AwsCredentials,
        method: str,
        path: str,
        query: str,
        host: str,
        headers: Sequence[tuple[str, str]],
        second: int,
    ) -> _Kind:
        if not _is_word(method + host):
            raise ValueError(_NO_WORDS)
        stamp = self._stamp(second)
        day = self._day_of(credentials, stamp[:8])
        lines, names = _signed_headers(headers, host, stamp, day.token_line)
        target = f"{method}\n{_canonical_path(path)}\n{canonical_query(query) if query else ''}"
        before = (
            f"authorization: {_ALGORITHM} Credential={credentials.access_key}/{day.scope}, "
            f"SignedHeaders={names}, Signature="
        )
        token = f"x-amz-security-token: {credentials.token}\r\n" if credentials.token is not None else ""
        return _Kind(
            day,
            f"{_ALGORITHM}\n{stamp}\n{day.scope}\n".encode(),
            f"{target}\n{lines}\n{names}\n".encode(),
            before.encode(),
            f"\r\nx-amz-date: {stamp}\r\n{token}".encode(),
        )

    def _stamp(self, second: int) -> str:
        known, stamp = self._now
        if known != second:
            stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(second))
            self._now = (second, stamp)
        return stamp

    def _day_of(self, credentials: AwsCredentials, date: str) -> _Day:
        day = self._day
        if day is None or day.credentials is not credentials or day.date != date:
            day = self._day = _Day(credentials, date, self._region, self._service)
        return day


def canonical_query(query: str) -> str:
    """The one spelling of a query that is both signed and safe to send: decoded, encoded strictly, sorted.

    A plus sign stands for itself, as nothing but a form would mean a space by it.
    """
    if not _is_word(query) or _LONE_PERCENT.search(query):
        raise ValueError("a query is printable ASCII without spaces, in which '%' begins an encoded byte")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    strict = sorted((_strict(name), _strict(value)) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in strict)


def _strict(text: str) -> str:
    return quote_from_bytes(unquote_to_bytes(text), safe="")


@lru_cache(_PATHS_REMEMBERED)
def _canonical_path(path: str) -> str:
    """The path encoded a second time, as every service but S3 does before it compares."""
    if not path.startswith("/") or not _is_word(path):
        raise ValueError("a path begins with '/' and is printable ASCII without spaces")
    # The service would fold such segments away, and then it is not the path sent that was signed.
    if _DOT_OR_EMPTY_SEGMENT.search(path):
        raise ValueError("a path has no empty segments and none of '.' or '..'")
    return quote(path, safe="/")


def _signed_headers(headers: Sequence[tuple[str, str]], host: str, stamp: str, token_line: str) -> tuple[str, str]:
    """The canonical header lines, and the names of the headers in them."""
    own_lines = f"host:{host}\nx-amz-date:{stamp}\n{token_line}"
    own_names = "host;x-amz-date;x-amz-security-token" if token_line else "host;x-amz-date"
    if not headers:
        return own_lines, own_names
    if len(headers) == 1 and headers[0][0] == "content-type":
        return f"content-type:{_canonical_value(headers[0][1])}\n{own_lines}", f"content-type;{own_names}"
    return _merged(headers, own_lines)


def _merged(headers: Iterable[tuple[str, str]], own_lines: str) -> tuple[str, str]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        if not _HEADER_NAME.fullmatch(name) or name in _OWN_HEADERS:
            raise ValueError(f"a header to sign has a name in lower case that is not the signer's own, not {name!r}")
        values.setdefault(name, []).append(_canonical_value(value))
    lines = [(name, f"{name}:{','.join(several)}\n") for name, several in values.items()]
    lines += [(line.partition(":")[0], line) for line in own_lines.splitlines(keepends=True)]
    lines.sort()
    return "".join(line for _, line in lines), ";".join(name for name, _ in lines)


def _canonical_value(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ValueError("a header to sign is printable ASCII")
    return " ".join(value.split())


def _is_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
