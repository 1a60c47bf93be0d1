"""Upper bound on the tokens of a request's input, and the readers of body members that add to it. Pure.

A tokenizer makes at most one token of each byte of text. In addition a model's template adds tokens. Templates are
not published, so each figure is several times what is known of any; a bound that is too high costs nothing but
money that is reserved for a moment.

    REQUEST_TOKENS     any call: a system prompt of the model's own (Command R, gpt-oss and Qwen have one, some tens to
                       four hundred tokens), dates, an opening, instructions on thinking or on the answer's form
    TOOLS_TOKENS       once if there are tools or documents: Claude's system prompt for them is 159 to 804
                       tokens, Command R's about 600
    TOOL_TOKENS        the frame of each tool: about 20
    MESSAGE_TOKENS     the marks around a message: 3 to 8
    BLOCK_TOKENS       between two blocks: 0 to 2
    TOOL_BLOCK_TOKENS  the frame of a tool call or its result: 20 to 40
    MARK_TOKENS        each value in the JSON of tools: Claude's form for a parameter takes about 12 tokens, four
                       of which its JSON already counts; a line of its own with its indent takes two

A member that no reader knows is refused, as it might cost anything. Start with `TokenBound` and `read_members`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final
from unicodedata import normalize

import orjson

from price_keeper.errors import InvalidRequest

REQUEST_TOKENS: Final = 1000
TOOLS_TOKENS: Final = 2000
TOOL_TOKENS: Final = 64
MESSAGE_TOKENS: Final = 16
BLOCK_TOKENS: Final = 8
TOOL_BLOCK_TOKENS: Final = 64
MARK_TOKENS: Final = 8

# Some tokenizers normalise text first, which makes a few characters up to eleven times as long.
GROWTH_BYTES: Final = 30  # of the character that grows the most
_GROWING_RANGES = (range(0x80, 0x3400), range(0xF900, 0x10000))
# Beyond those ranges only some musical symbols and framed letters grow. These are the UTF-8 prefixes of such
# characters, 64 characters each.
_FAR_GROWING_PREFIXES = (
    b"\xf0\x9d\x85",
    b"\xf0\x9d\x86",
    b"\xf0\x9d\x87",
    b"\xf0\x9f\x84",
    b"\xf0\x9f\x88",
    b"\xf0\x9f\x89",
)
SLICE_CHARACTERS = 16_384  # which take a millisecond
_MAX_QUOTED_CHARACTERS = 100
REMOTE_CONTENT = "content stored elsewhere may change before the model reads it; send it in the request itself"


class TokenBound:
    """Adds up the tokens of a request. `uncounted` names the first content whose tokens its bytes do not bound,
    although CountTokens can count them."""

    __slots__ = ("_is_ascii", "tokens", "uncounted")

    def __init__(self, text: bytes) -> None:
        """`text` is the whole body, though part of it is no prompt."""
        self.tokens = REQUEST_TOKENS + len(text)
        self.uncounted = ""
        self._is_ascii = text.isascii()
        if not self._is_ascii:
            self.tokens += measure_growth(text)

    def add_json(self, value: Any) -> None:
        """Add for JSON that a template writes in another form."""
        written = orjson.dumps(value)
        marks = written.count(b",") + written.count(b"{") + written.count(b"[")
        self.tokens += MARK_TOKENS * marks
        if not self._is_ascii:  # many templates write it in ASCII
            self.tokens += max(0, len(json.dumps(value)) - len(written))

    def leave_uncounted(self, what: str) -> None:
        """The tokens of this content have to be counted by CountTokens."""
        self.uncounted = self.uncounted or what


MemberReader = Callable[[TokenBound, Any], None]


def measure_growth(text: bytes) -> int:
    """An upper bound of the bytes by which the text is longer in any normal form that tokenizers use."""
    characters = text.decode()
    count = sum(map(text.count, _FAR_GROWING_PREFIXES))
    # Between two slices other threads can run.
    for start in range(0, len(characters), SLICE_CHARACTERS):
        piece = characters[start : start + SLICE_CHARACTERS]
        if not piece.isascii() and _build_growing_pattern().search(piece):
            count += len(piece) - len(_build_growing_pattern().sub("", piece))
    return GROWTH_BYTES * count


@cache
def _build_growing_pattern() -> re.Pattern[str]:
    """Built at first use, as it takes some milliseconds."""
    return re.compile(f"[{''.join(filter(_may_grow, map(chr, chain(*_GROWING_RANGES))))}]")


def _may_grow(character: str) -> bool:
    size = len(character.encode())
    return any(len(normalize(form, character).encode()) > size for form in ("NFC", "NFKC"))


def build_unbounded_error(what: str, why: str = "its cost is not known") -> InvalidRequest:
    return InvalidRequest(f"this budget is hard, and {what} cannot be bounded: {why}")


def quote_name(name: Any) -> str:
    return ascii(name if not isinstance(name, str) else name[:_MAX_QUOTED_CHARACTERS])


def ignore(_: TokenBound, __: Any) -> None:
    """A parameter that is no prompt and lengthens no answer. Its bytes are counted all the same."""


def read_text(bound: TokenBound, value: Any) -> None:
    if value is not None and type(value) is not str:
        raise InvalidRequest("a text in the body is no string")
    bound.tokens += BLOCK_TOKENS


def read_json(bound: TokenBound, value: Any) -> None:
    bound.add_json(value)


def read_tool_call(bound: TokenBound, value: Any) -> None:
    """A call of a tool, or its input."""
    bound.tokens += TOOL_BLOCK_TOKENS
    bound.add_json(value)


def require_list(value: Any, what: str) -> list[Any]:
    """None counts as an empty list, as it does in the model families that accept it."""
    if value is None:
        return []
    if type(value) is not list:
        raise InvalidRequest(f"{what} in the body are no list")
    return value


def require_tools(bound: TokenBound, value: Any, what: str = "tools") -> list[Any]:
    """The list of tools, or of what a template presents like them. Adds what models say about tools."""
    tools = require_list(value, what)
    bound.tokens += TOOLS_TOKENS if tools else 0
    return tools


def require_object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequest(f"{what} in the body is no object")
    return value


def read_members(bound: TokenBound, value: Any, readers: Mapping[str, MemberReader], where: str) -> None:
    if type(value) is not dict:
        raise InvalidRequest(f"{where} in the body is no object")
    for name, inner in value.items():
        reader = readers.get(name)
        if reader is None:
            raise build_unbounded_error(f"{quote_name(name)} in {where}")
        reader(bound, inner)


def make_object_reader(where: str, readers: Mapping[str, MemberReader], frame_tokens: int = 0) -> MemberReader:
    """A reader of an object with these members, around which a template puts so many tokens."""

    def read(bound: TokenBound, value: Any) -> None:
        bound.tokens += frame_tokens
        read_members(bound, value, readers, where)

    return read


def make_list_reader(what: str, read_one: MemberReader) -> MemberReader:
    """A reader of a list. None counts as an empty one."""

    def read(bound: TokenBound, value: Any) -> None:
        for one in require_list(value, what):
            read_one(bound, one)

    return read


def make_messages_reader(readers: Mapping[str, MemberReader]) -> MemberReader:
    """A reader of messages with these members."""
    return make_list_reader("messages", make_object_reader("a message", readers, MESSAGE_TOKENS))


def make_members_reader(where: str, readers: Mapping[str, MemberReader]) -> MemberReader:
    """A reader of an object with these members. None counts as left out."""

    def read(bound: TokenBound, value: Any) -> None:
        if value is not None:
            read_members(bound, value, readers, where)

    return read


def make_counted_reader(what: str, *names: str) -> MemberReader:
    """A reader of an object with these members only. All of their content is in the request itself, so CountTokens can
    count it."""

    def read(bound: TokenBound, value: Any) -> None:
        for name in require_object(value, what):
            if name not in names:
                raise build_unbounded_error(f"{quote_name(name)} in {what}")
        bound.leave_uncounted(what)

    return read


def ignore_members(*names: str) -> dict[str, MemberReader]:
    return dict.fromkeys(names, ignore)


def read_text_or_blocks(
    bound: TokenBound, value: Any, readers_by_type: Mapping[str, Mapping[str, MemberReader]]
) -> None:
    """A text, or blocks with a type. Raises InvalidRequest for a type that is not in `readers_by_type`."""
    if type(value) is str:
        bound.tokens += BLOCK_TOKENS
        return
    for block in require_list(value, "blocks"):
        kind = require_object(block, "a block").get("type")
        members = readers_by_type.get(kind) if type(kind) is str else None
        if members is None:
            raise build_unbounded_error(f"a block of type {quote_name(kind)}")
        read_members(bound, block, members, f"a block of type {kind!r}")
