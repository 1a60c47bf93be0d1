"""Readers of parts of a body. What none of them knows is refused: it might cost anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from price_keeper.errors import InvalidRequest
from price_keeper.hard.tally import BLOCK_TOKENS, MemberReader, TokenBound

_MAX_QUOTED_CHARACTERS = 100


def build_unbounded_error(what: str, why: str = "nobody here knows what it may cost") -> InvalidRequest:
    return InvalidRequest(f"this budget is hard, and {what} cannot be bounded: {why}")


def quote_name(name: Any) -> str:
    return ascii(name if not isinstance(name, str) else name[:_MAX_QUOTED_CHARACTERS])


def ignore(_: TokenBound, __: Any) -> None:
    """A parameter: it is no prompt and lengthens no answer. Its bytes are counted all the same."""


def read_text(bound: TokenBound, value: Any) -> None:
    if value is not None and type(value) is not str:
        raise InvalidRequest("a text in the body is no string")
    bound.tokens += BLOCK_TOKENS


def read_texts(bound: TokenBound, value: Any) -> None:
    for each in require_list(value, "texts"):
        read_text(bound, each)


def read_json(bound: TokenBound, value: Any) -> None:
    bound.add_json(value)


def require_list(value: Any, what: str) -> list[Any]:
    """None is an empty one, as it is to the families that know it."""
    if value is None:
        return []
    if type(value) is not list:
        raise InvalidRequest(f"{what} in the body are no list")
    return value


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


def make_members_reader(where: str, readers: Mapping[str, MemberReader]) -> MemberReader:
    """None is as good as left out."""

    def read(bound: TokenBound, value: Any) -> None:
        if value is not None:
            read_members(bound, value, readers, where)

    return read


def make_counted_reader(what: str, *names: str) -> MemberReader:
    """Of an object with these members; whatever they hold is in the request itself, so that it can be counted."""

    def read(bound: TokenBound, value: Any) -> None:
        for name in require_object(value, what):
            if name not in names:
                raise build_unbounded_error(f"{quote_name(name)} in {what}")
        bound.leave_uncounted(what)

    return read


def ignore_members(*names: str) -> dict[str, MemberReader]:
    return dict.fromkeys(names, ignore)


REMOTE_CONTENT = "what stands elsewhere may be another thing when the model reads it; send it in the request itself"


def read_text_or_blocks(
    bound: TokenBound, value: Any, readers_by_type: Mapping[str, Mapping[str, MemberReader]]
) -> None:
    """A text, or blocks that say of which type they are. Raises InvalidRequest for one that is not `known`."""
    if type(value) is str:
        bound.tokens += BLOCK_TOKENS
        return
    for block in require_list(value, "blocks"):
        kind = require_object(block, "a block").get("type")
        members = readers_by_type.get(kind) if type(kind) is str else None
        if members is None:
            raise build_unbounded_error(f"a block of type {quote_name(kind)}")
        read_members(bound, block, members, f"a block of type {kind!r}")
