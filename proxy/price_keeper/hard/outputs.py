"""The most tokens that a request's answer can be, and a body that says so. Pure.

A body that does not say it gets the label's `max_output_tokens`; all else of it stays as the caller sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from price_keeper.errors import InvalidRequest
from price_keeper.forwarding import json_splice
from price_keeper.hard.forms import Form, Path
from price_keeper.hard.members import told
from price_keeper.metering.bodies import MOST_TOKENS

KEY = "max_output_tokens"
_THINKING = ("thinking", "reasoning_config")  # where Claude is told how much of its answer it may think
_BUDGET = "budget_tokens"

Json = Mapping[str, Any]


class Capped(NamedTuple):
    tokens: int
    body: bytes


def capped(form: Form, document: Json, body: bytes, label_max: int | None) -> Capped:
    """The document is what the body says, and `weighed` has found it in order. Raises InvalidRequest."""
    if not form.caps:
        return Capped(0, body)
    stated, empty = _stated(form.caps, document)
    if stated:
        limit = max(stated)
    else:
        limit = _of_label(form, label_max)
        empty = empty or [form.caps[0]]
    for path in empty:
        body = _put(body, path, limit)
    times = _times(form, document)
    _check_thinking(document, limit)
    if form.inner is not None and document.get(form.additional):
        more: Json = document[form.additional]
        _check_thinking(more, limit)
        limit = max(limit, _overriding(form.inner, more))
        times *= _times(form.inner, more)
    return Capped(limit * times, body)


def _stated(caps: tuple[Path, ...], document: Json) -> tuple[list[int], list[Path]]:
    """What is stated, and where null stands in its place, which a model may take for no limit."""
    stated, empty = [], []
    for path in caps:
        place: Any = document
        for name in path[:-1]:
            place = place.get(name) or {}
        if path[-1] in place:
            value = place[path[-1]]
            if value is None:
                empty.append(path)
            else:
                stated.append(_whole(value, ".".join(path)))
    return stated, empty


def _overriding(form: Form, more: Json) -> int:
    """Which of two limits a model goes by is not known, so it is the larger one."""
    stated, empty = _stated(form.caps, more)
    if empty:
        raise InvalidRequest(f"{'.'.join(empty[0])} is a whole number of at least 1, or left out; found null")
    return max(stated, default=0)


def _times(form: Form, document: Json) -> int:
    times = 1
    for name in form.times:
        if document.get(name) is not None:
            times *= _whole(document[name], name)
    return times


def _check_thinking(document: Json, limit: int) -> None:
    """Thinking is a part of the answer. With a budget beyond it the limit might be no limit."""
    for name in _THINKING:
        thinking = document.get(name)
        if thinking is None:
            continue
        if type(thinking) is not dict:
            raise InvalidRequest(f"{name} in the body is no object")
        if thinking.get(_BUDGET) is not None:
            budget = _whole(thinking[_BUDGET], f"{name}.{_BUDGET}")
            if budget >= limit:
                raise InvalidRequest(
                    f"this budget is hard: {name}.{_BUDGET} has to be less than the most tokens of the answer, "
                    f"which are {limit} here; found {budget}"
                )


def _whole(value: Any, name: str) -> int:
    if type(value) is int and 1 <= value <= MOST_TOKENS:
        return value
    raise InvalidRequest(f"this budget is hard: {name} is a whole number of 1 to {MOST_TOKENS}, found {_found(value)}")


def _found(value: Any) -> str:
    return told(value) if isinstance(value, str) else told(orjson.dumps(value).decode())


def _of_label(form: Form, label_max: int | None) -> int:
    if label_max is None:
        name = ".".join(form.caps[0])
        raise InvalidRequest(
            f"this budget is hard, so a request has to say how long its answer may be: add {name} to it, "
            f"or have {KEY} set for the label in config.yaml, which is put in where it is left out"
        )
    return label_max


def _put(body: bytes, path: Path, limit: int) -> bytes:
    try:
        return _with(body, path, b"%d" % limit)
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None


def _with(data: bytes, path: Path, value: bytes) -> bytes:
    name = path[0]
    found = json_splice.find_members(data, (name,))
    span = found.spans.get(name)
    if len(path) > 1:
        inner = b"{}" if span is None or data[slice(*span)] == b"null" else data[slice(*span)]
        value = _with(inner, path[1:], value)
    return json_splice.add_member(data, found, name, value) if span is None else json_splice.replace_span(data, span, value)
