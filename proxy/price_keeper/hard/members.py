"""Readers of parts of a body. What none of them knows is refused: it might cost anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from price_keeper.errors import InvalidRequest
from price_keeper.hard.tally import BLOCK, Reader, Tally

_LONGEST_TOLD = 100


def unbounded(what: str, why: str = "nobody here knows what it may cost") -> InvalidRequest:
    return InvalidRequest(f"this budget is hard, and {what} cannot be bounded: {why}")


def told(name: Any) -> str:
    return ascii(name if not isinstance(name, str) else name[:_LONGEST_TOLD])


def ignored(_: Tally, __: Any) -> None:
    """A parameter: it is no prompt and lengthens no answer. Its bytes are counted all the same."""


def text(tally: Tally, value: Any) -> None:
    if value is not None and type(value) is not str:
        raise InvalidRequest("a text in the body is no string")
    tally.tokens += BLOCK


def texts(tally: Tally, value: Any) -> None:
    for each in listed(value, "texts"):
        text(tally, each)


def free(tally: Tally, value: Any) -> None:
    tally.json(value)


def listed(value: Any, what: str) -> list[Any]:
    """None is an empty one, as it is to the families that know it."""
    if value is None:
        return []
    if type(value) is not list:
        raise InvalidRequest(f"{what} in the body are no list")
    return value


def an_object(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidRequest(f"{what} in the body is no object")
    return value


def read_members(tally: Tally, value: Any, known: Mapping[str, Reader], where: str) -> None:
    if type(value) is not dict:
        raise InvalidRequest(f"{where} in the body is no object")
    for name, inner in value.items():
        reader = known.get(name)
        if reader is None:
            raise unbounded(f"{told(name)} in {where}")
        reader(tally, inner)


def of_members(where: str, known: Mapping[str, Reader]) -> Reader:
    """None is as good as left out."""

    def read(tally: Tally, value: Any) -> None:
        if value is not None:
            read_members(tally, value, known, where)

    return read


def left_to_count(what: str, *known: str) -> Reader:
    """Of an object with these members; whatever they hold is in the request itself, so that it can be counted."""

    def read(tally: Tally, value: Any) -> None:
        for name in an_object(value, what):
            if name not in known:
                raise unbounded(f"{told(name)} in {what}")
        tally.leave(what)

    return read


def parameters(*names: str) -> dict[str, Reader]:
    return dict.fromkeys(names, ignored)


ELSEWHERE = "what stands elsewhere may be another thing when the model reads it; send it in the request itself"


def text_or_blocks(tally: Tally, value: Any, known: Mapping[str, Mapping[str, Reader]]) -> None:
    """A text, or blocks that say of which type they are. Raises InvalidRequest for one that is not `known`."""
    if type(value) is str:
        tally.tokens += BLOCK
        return
    for block in listed(value, "blocks"):
        kind = an_object(block, "a block").get("type")
        members = known.get(kind) if type(kind) is str else None
        if members is None:
            raise unbounded(f"a block of type {told(kind)}")
        read_members(tally, block, members, f"a block of type {kind!r}")
