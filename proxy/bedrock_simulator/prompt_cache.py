"""Prompt caching as on Bedrock: reads the longest cached prefix, and writes the rest up to the last cache point. Pure.

A prefix is identified by the hash of everything before its cache point. Requests with cache points cost one digest per
block; others cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from bedrock_simulator.aws_errors import validation_error
from bedrock_simulator.usage import Usage

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}

_MAX_CACHE_POINTS = 4  # in one request
_LOOK_BACK_BLOCKS = 20  # a cached prefix may end at most this many blocks before a cache point
_MAX_PREFIXES = 10_000


@dataclass(slots=True)
class Piece:
    """A part of a prompt. `ttl` is the cache TTL of everything up to its end; None without a cache point."""

    tokens: int
    content: Any
    ttl: str | None = None


class PromptCache:
    def __init__(self, monotonic: Callable[[], float], min_tokens: int) -> None:
        """Prefixes with fewer than `min_tokens` are not cached, as providers have such a minimum too."""
        self._monotonic = monotonic
        self._min_tokens = min_tokens
        self._expiries: OrderedDict[bytes, float] = OrderedDict()

    def read_and_write(self, model: str, pieces: Sequence[Piece]) -> Usage:
        """The new, read and written tokens of a prompt. Later requests may read what this one writes."""
        total = sum(piece.tokens for piece in pieces)
        marks = [index for index, piece in enumerate(pieces) if piece.ttl]
        if not marks:
            return Usage(input_tokens=total)
        _check_marks(pieces, marks)
        prefixes = _hash_prefixes(model, pieces[: marks[-1] + 1])
        read = self._find_longest_prefix(prefixes, marks)
        written = {"5m": 0, "1h": 0}
        covered = read
        for mark in marks:
            key, tokens = prefixes[mark]
            if tokens >= self._min_tokens:
                ttl = pieces[mark].ttl or "5m"
                written[ttl] += max(0, tokens - covered)
                covered = max(covered, tokens)
                self._store(key, TTL_SECONDS[ttl])
        return Usage(total - covered, 0, read, written["5m"], written["1h"])

    def _find_longest_prefix(self, prefixes: Sequence[tuple[bytes, int]], marks: Sequence[int]) -> int:
        for mark in reversed(marks):
            for key, tokens in reversed(prefixes[max(0, mark - _LOOK_BACK_BLOCKS) : mark + 1]):
                if self._expiries.get(key, 0) > self._monotonic():
                    return tokens
        return 0

    def _store(self, key: bytes, seconds: float) -> None:
        self._expiries[key] = max(self._expiries.pop(key, 0), self._monotonic() + seconds)
        if len(self._expiries) > _MAX_PREFIXES:
            self._expiries.popitem(last=False)


def _hash_prefixes(model: str, pieces: Sequence[Piece]) -> list[tuple[bytes, int]]:
    """For the end of each piece: the hash and the tokens of everything up to there."""
    digest, tokens, prefixes = sha256(model.encode()), 0, []
    for piece in pieces:
        written = orjson.dumps(piece.content)
        digest.update(b"%d:" % len(written) + written)
        tokens += piece.tokens
        prefixes.append((digest.digest(), tokens))
    return prefixes


def _check_marks(pieces: Sequence[Piece], marks: Sequence[int]) -> None:
    if len(marks) > _MAX_CACHE_POINTS:
        raise validation_error(f"A maximum of {_MAX_CACHE_POINTS} cache points may be provided. Found {len(marks)}.")
    lifetimes = [TTL_SECONDS.get(pieces[mark].ttl or "", 0.0) for mark in marks]
    if 0.0 in lifetimes:
        raise validation_error("The ttl of a cache point is '5m' or '1h'.")
    if lifetimes != sorted(lifetimes, reverse=True):
        raise validation_error("A cache point with ttl '1h' must not come after one with ttl '5m'.")
