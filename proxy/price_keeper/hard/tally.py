"""Adds up the most tokens that a request's input can be. Pure.

A tokenizer makes at most one token of each byte of text: those of bytes by their making, those of pieces and words fall
back to bytes at worst. Beside the text stands what a model's template adds. Nobody publishes all of those, so each
figure here is some times what is known of any; a bound that is too high is money set aside for a moment, no more.

    REQUEST   what every call may get: a system prompt of its own (Command R, gpt-oss and Qwen have one, of some tens to
              four hundred tokens), dates, an opening, what is said of thinking or of a form for the answer
    TOOLS     once, if there are tools or documents: Claude's system prompt about them is 159 to 804 tokens, Command R's
              about 600
    TOOL      the frame of each tool: about 20
    MESSAGE   the marks around a message: 3 to 8
    BLOCK     what stands between two blocks: 0 to 2
    TOOL_BLOCK  the frame of a call, or of its result: 20 to 40
    MARK      each value in the JSON of tools: Claude's form for a parameter takes about 12 tokens, of which its JSON
              already counts four; a line of its own with its indent takes two
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, Final
from unicodedata import normalize

import orjson

REQUEST_TOKENS: Final = 1000
TOOLS_TOKENS: Final = 2000
TOOL_TOKENS: Final = 64
MESSAGE_TOKENS: Final = 16
BLOCK_TOKENS: Final = 8
TOOL_BLOCK_TOKENS: Final = 64
MARK_TOKENS: Final = 8

# Some tokenizers bring text into a normal form first, in which a few characters are up to eleven times as long.
GROWTH_BYTES: Final = 30  # bytes, of the one that grows the most
_GROWING_RANGES = (range(0x80, 0x3400), range(0xF900, 0x10000))
# Beyond those only some of music and of letters in frames grow. How such characters begin in UTF-8, 64 in each.
_FAR_GROWING_PREFIXES = (
    b"\xf0\x9d\x85",
    b"\xf0\x9d\x86",
    b"\xf0\x9d\x87",
    b"\xf0\x9f\x84",
    b"\xf0\x9f\x88",
    b"\xf0\x9f\x89",
)


class TokenBound:
    """`uncounted` is the first thing met whose tokens are not told by its bytes, though Bedrock can count them."""

    __slots__ = ("_is_ascii", "tokens", "uncounted")

    def __init__(self, text: bytes) -> None:
        """`text` is all of the body, of which some is no prompt."""
        self.tokens = REQUEST_TOKENS + len(text)
        self.uncounted = ""
        self._is_ascii = text.isascii()
        if not self._is_ascii:
            self.tokens += measure_growth(text)

    def add_json(self, value: Any) -> None:
        """What a template writes in a form of its own."""
        written = orjson.dumps(value)
        marks = written.count(b",") + written.count(b"{") + written.count(b"[")
        self.tokens += MARK_TOKENS * marks
        if not self._is_ascii:  # many write it in ASCII
            self.tokens += max(0, len(json.dumps(value)) - len(written))

    def leave_uncounted(self, what: str) -> None:
        self.uncounted = self.uncounted or what


MemberReader = Callable[[TokenBound, Any], None]


SLICE_CHARACTERS = 16_384  # characters, which take a millisecond


def measure_growth(text: bytes) -> int:
    """At least the bytes by which the text is longer in any normal form that tokenizers use."""
    characters = text.decode()
    count = sum(map(text.count, _FAR_GROWING_PREFIXES))
    # In slices, between which other threads have their turn.
    for start in range(0, len(characters), SLICE_CHARACTERS):
        piece = characters[start : start + SLICE_CHARACTERS]
        if not piece.isascii() and _build_growing_pattern().search(piece):
            count += len(piece) - len(_build_growing_pattern().sub("", piece))
    return GROWTH_BYTES * count


@cache
def _build_growing_pattern() -> re.Pattern[str]:
    """Made when it is first needed, as that takes some milliseconds."""
    return re.compile(f"[{''.join(filter(_may_grow, map(chr, chain(*_GROWING_RANGES))))}]")


def _may_grow(character: str) -> bool:
    size = len(character.encode())
    return any(len(normalize(form, character).encode()) > size for form in ("NFC", "NFKC"))
