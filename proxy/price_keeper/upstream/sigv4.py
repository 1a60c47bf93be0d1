"""AWS Signature Version 4 over exactly the bytes that are sent.

START HERE: `Signer.sign`. What stays the same for a day (the signing key) or for a second (the time stamp, and for
similar calls everything but the hash of the body) is cached, also as the beginnings of hashes, which are copied and
continued. So a signature costs the end of one hash and one HMAC of a short text.
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
from typing import Any, Final, NamedTuple
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_BLOCK_BYTES: Final = 64  # of SHA-256
_INNER_PAD, _OUTER_PAD = (bytes(code ^ pad for code in range(256)) for pad in (0x36, 0x5C))
_NOT_PRINTABLE: Final = "a method, a host and a body's hash are printable ASCII without spaces"
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")
_SCOPE_PART: Final = re.compile(r"[a-z0-9-]+")
_DOT_OR_EMPTY_SEGMENT: Final = re.compile(r"/\.{0,2}/|/\.{1,2}\Z")
_LONE_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_OWN_HEADERS: Final = frozenset({"host", "authorization", "x-amz-date", "x-amz-security-token"})

# Paths recur: one for every label and operation. A path has at most about 6 kB, so the cache cannot exceed 5 MB.
_MAX_CACHED_PATHS: Final = 256


@dataclass(frozen=True, slots=True)
class AwsCredentials:
    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # The messages do not quote the values, so that none of them gets into a log.
        if not (
            self.access_key
            and _is_printable_word(self.access_key)
            and self.secret_key
            and _is_printable_word(self.secret_key)
        ):
            raise ValueError("an access key and its secret are printable ASCII without spaces")
        if self.token is not None and not _is_printable_word(self.token):
            raise ValueError("a session token is printable ASCII without spaces")


class _DailySigningKey:
    """The signing key that one set of credentials leads to, for one UTC day."""

    __slots__ = ("credentials", "date", "inner", "outer", "scope", "token_line")

    def __init__(self, credentials: AwsCredentials, date: str, region: str, service: str) -> None:
        self.credentials = credentials
        self.date = date
        self.scope = f"{date}/{region}/{service}/aws4_request"
        self.token_line = "" if credentials.token is None else f"x-amz-security-token:{credentials.token}\n"
        key = f"AWS4{credentials.secret_key}".encode()
        for part in (date, region, service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        # The two halves of HMAC (RFC 2104) with the key already in them: half of its work, and the same all day.
        padded = key.ljust(_BLOCK_BYTES, b"\0")
        self.inner, self.outer = sha256(padded.translate(_INNER_PAD)), sha256(padded.translate(_OUTER_PAD))


class _RequestTemplate(NamedTuple):
    """What all similar calls within one second have in common. The hashes are copied and continued for each of them."""

    canonical: Any  # SHA-256 of the canonical request, up to the hash of the body
    inner: Any  # of the signing key's first half, and the text that is signed up to the hash of the canonical request
    outer: Any  # of the signing key's second half
    before: bytes  # header lines up to the signature
    after: bytes


class Signer:
    """Signs requests for one region and service."""

    def __init__(self, region: str, service: str = "bedrock") -> None:
        for part in (region, service):
            if not _SCOPE_PART.fullmatch(part):
                raise ValueError(f"a region or service is lower-case letters, digits and '-', not {part!r}")
        self._region = region
        self._service = service
        # One of each suffices: all calls share the clock, and credentials stay the same object until they are renewed.
        self._cached_stamp: tuple[int, str] = (0, "19700101T000000Z")
        self._key: _DailySigningKey | None = None
        # For requests that sign a content type or no header at all.
        self._templates: dict[tuple[str, str, str, str | None], _RequestTemplate] = {}
        self._templates_valid_for: tuple[int, AwsCredentials | None] = (0, None)  # the second, and the credentials

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
        """Return the header lines that sign this request at the epoch `at`, each ending in CRLF.

        `path` and `host` are as they are sent. `query` has no question mark, and what is sent must mean the same
        (the result of `canonicalize_query` always does). `headers` are signed in addition to the signer's own, with
        names in lower case. A single content-type, or none, takes the fast path.
        """
        second, is_quick = int(at), not query and body_sha256.isalnum()
        if is_quick and (not headers or (len(headers) == 1 and headers[0][0] == "content-type")):
            template = self._get_template(credentials, method, path, host, headers[0][1] if headers else None, second)
        else:
            if not _is_printable_word(body_sha256):
                raise ValueError(_NOT_PRINTABLE)
            template = self._build_template(credentials, method, path, query, host, headers, second)
        canonical, inner, outer = template.canonical.copy(), template.inner.copy(), template.outer.copy()
        canonical.update(body_sha256.encode("ascii"))
        inner.update(hexlify(canonical.digest()))
        outer.update(inner.digest())
        return template.before + hexlify(outer.digest()) + template.after

    def _get_template(
        self, credentials: AwsCredentials, method: str, path: str, host: str, content_type: str | None, second: int
    ) -> _RequestTemplate:
        valid_for = self._templates_valid_for
        if valid_for[0] != second or valid_for[1] is not credentials or len(self._templates) > _MAX_CACHED_PATHS:
            self._templates, self._templates_valid_for = {}, (second, credentials)
        key = (method, path, host, content_type)
        template = self._templates.get(key)
        if template is None:
            headers = () if content_type is None else (("content-type", content_type),)
            template = self._templates[key] = self._build_template(credentials, method, path, "", host, headers, second)
        return template

    def _build_template(
        self,
        credentials: AwsCredentials,
        method: str,
        path: str,
        query: str,
        host: str,
        headers: Sequence[tuple[str, str]],
        second: int,
    ) -> _RequestTemplate:
        if not _is_printable_word(method + host):
            raise ValueError(_NOT_PRINTABLE)
        stamp = self._format_stamp(second)
        key = self._get_key(credentials, stamp[:8])
        lines, names = _build_signed_headers(headers, host, stamp, key.token_line)
        target = f"{method}\n{_canonicalize_path(path)}\n{canonicalize_query(query) if query else ''}"
        before = (
            f"authorization: {_ALGORITHM} Credential={credentials.access_key}/{key.scope}, "
            f"SignedHeaders={names}, Signature="
        )
        token = f"x-amz-security-token: {credentials.token}\r\n" if credentials.token is not None else ""
        inner = key.inner.copy()
        inner.update(f"{_ALGORITHM}\n{stamp}\n{key.scope}\n".encode())
        return _RequestTemplate(
            sha256(f"{target}\n{lines}\n{names}\n".encode()),
            inner,
            key.outer,
            before.encode(),
            f"\r\nx-amz-date: {stamp}\r\n{token}".encode(),
        )

    def _format_stamp(self, second: int) -> str:
        cached, stamp = self._cached_stamp
        if cached != second:
            stamp = strftime("%Y%m%dT%H%M%SZ", gmtime(second))
            self._cached_stamp = (second, stamp)
        return stamp

    def _get_key(self, credentials: AwsCredentials, date: str) -> _DailySigningKey:
        key = self._key
        if key is None or key.credentials is not credentials or key.date != date:
            key = self._key = _DailySigningKey(credentials, date, self._region, self._service)
        return key


def canonicalize_query(query: str) -> str:
    """Return the one spelling of a query that is both signed and safe to send: decoded, encoded strictly, sorted.

    A plus sign stands for itself, because only a form would mean a space by it.
    """
    if not _is_printable_word(query) or _LONE_PERCENT.search(query):
        raise ValueError("a query is printable ASCII without spaces, in which '%' begins an encoded byte")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    strict = sorted((_reencode(name), _reencode(value)) for name, _, value in pairs)
    return "&".join(f"{name}={value}" for name, value in strict)


def _reencode(text: str) -> str:
    return quote_from_bytes(unquote_to_bytes(text), safe="")


@lru_cache(_MAX_CACHED_PATHS)
def _canonicalize_path(path: str) -> str:
    """Encode the path a second time, as every service but S3 does before it compares."""
    if not path.startswith("/") or not _is_printable_word(path):
        raise ValueError("a path begins with '/' and is printable ASCII without spaces")
    # The service would resolve such segments, and its path would differ from the one that was signed.
    if _DOT_OR_EMPTY_SEGMENT.search(path):
        raise ValueError("a path has no empty segments and none of '.' or '..'")
    return quote(path, safe="/")


def _build_signed_headers(
    headers: Sequence[tuple[str, str]], host: str, stamp: str, token_line: str
) -> tuple[str, str]:
    """Return the canonical header lines, and the names of their headers."""
    own_lines = f"host:{host}\nx-amz-date:{stamp}\n{token_line}"
    own_names = "host;x-amz-date;x-amz-security-token" if token_line else "host;x-amz-date"
    if not headers:
        return own_lines, own_names
    if len(headers) == 1 and headers[0][0] == "content-type":
        return f"content-type:{_canonicalize_value(headers[0][1])}\n{own_lines}", f"content-type;{own_names}"
    return _merge_headers(headers, own_lines)


def _merge_headers(headers: Iterable[tuple[str, str]], own_lines: str) -> tuple[str, str]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        if not _HEADER_NAME.fullmatch(name) or name in _OWN_HEADERS:
            raise ValueError(f"a header to sign has a name in lower case that is not the signer's own, not {name!r}")
        values.setdefault(name, []).append(_canonicalize_value(value))
    lines = [(name, f"{name}:{','.join(several)}\n") for name, several in values.items()]
    lines += [(line.partition(":")[0], line) for line in own_lines.splitlines(keepends=True)]
    lines.sort()
    return "".join(line for _, line in lines), ";".join(name for name, _ in lines)


def _canonicalize_value(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ValueError("a header to sign is printable ASCII")
    return " ".join(value.split())


def _is_printable_word(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
