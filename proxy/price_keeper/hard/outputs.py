"""The most tokens that a request's answer can be, and a body that says so. Pure.

A body that does not say it gets the label's `max_output_tokens`; all else of it stays as the caller sent it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from price_keeper.errors import InvalidRequest
from price_keeper.hard.forms import MemberPath, RequestForm
from price_keeper.hard.members import quote_name
from price_keeper.metering.bodies import MAX_TOKENS
from price_keeper.upstream import json_splice

LABEL_LIMIT_SETTING = "max_output_tokens"
_THINKING = ("thinking", "reasoning_config")  # where Claude is told how much of its answer it may think
_THINKING_BUDGET = "budget_tokens"

Json = Mapping[str, Any]


class CappedBody(NamedTuple):
    tokens: int
    body: bytes


def cap_output(form: RequestForm, document: Json, body: bytes, label_max: int | None) -> CappedBody:
    """The document is what the body says, and `weighed` has found it in order. Raises InvalidRequest."""
    if not form.caps:
        return CappedBody(0, body)
    limits, null_paths = _read_limits(form.caps, document)
    if limits:
        limit = max(limits)
    else:
        limit = _require_label_limit(form, label_max)
        null_paths = null_paths or [form.caps[0]]
    for path in null_paths:
        body = _write_limit(body, path, limit)
    answer_count = _count_answers(form, document)
    _check_thinking(document, limit)
    if form.inner_form is not None and document.get(form.additional_member):
        additional: Json = document[form.additional_member]
        _check_thinking(additional, limit)
        limit = max(limit, _read_additional_limit(form.inner_form, additional))
        answer_count *= _count_answers(form.inner_form, additional)
    return CappedBody(limit * answer_count, body)


def _read_limits(caps: tuple[MemberPath, ...], document: Json) -> tuple[list[int], list[MemberPath]]:
    """What is stated, and where null stands in its place, which a model may take for no limit."""
    limits, null_paths = [], []
    for path in caps:
        place: Any = document
        for name in path[:-1]:
            place = place.get(name) or {}
        if path[-1] in place:
            value = place[path[-1]]
            if value is None:
                null_paths.append(path)
            else:
                limits.append(_require_whole(value, ".".join(path)))
    return limits, null_paths


def _read_additional_limit(form: RequestForm, additional: Json) -> int:
    """Which of two limits a model goes by is not known, so it is the larger one."""
    limits, null_paths = _read_limits(form.caps, additional)
    if null_paths:
        raise InvalidRequest(f"{'.'.join(null_paths[0])} is a whole number of at least 1, or left out; found null")
    return max(limits, default=0)


def _count_answers(form: RequestForm, document: Json) -> int:
    count = 1
    for name in form.answer_counts:
        if document.get(name) is not None:
            count *= _require_whole(document[name], name)
    return count


def _check_thinking(document: Json, limit: int) -> None:
    """Thinking is a part of the answer. With a budget beyond it the limit might be no limit."""
    for name in _THINKING:
        thinking = document.get(name)
        if thinking is None:
            continue
        if type(thinking) is not dict:
            raise InvalidRequest(f"{name} in the body is no object")
        if thinking.get(_THINKING_BUDGET) is not None:
            budget = _require_whole(thinking[_THINKING_BUDGET], f"{name}.{_THINKING_BUDGET}")
            if budget >= limit:
                raise InvalidRequest(
                    f"this budget is hard: {name}.{_THINKING_BUDGET} has to be less than the most tokens of the answer, "
                    f"which are {limit} here; found {budget}"
                )


def _require_whole(value: Any, name: str) -> int:
    if type(value) is int and 1 <= value <= MAX_TOKENS:
        return value
    raise InvalidRequest(
        f"this budget is hard: {name} is a whole number of 1 to {MAX_TOKENS}, found {_quote_value(value)}"
    )


def _quote_value(value: Any) -> str:
    return quote_name(value) if isinstance(value, str) else quote_name(orjson.dumps(value).decode())


def _require_label_limit(form: RequestForm, label_max: int | None) -> int:
    if label_max is None:
        name = ".".join(form.caps[0])
        raise InvalidRequest(
            f"this budget is hard, so a request has to say how long its answer may be: add {name} to it, "
            f"or have {LABEL_LIMIT_SETTING} set for the label in config.yaml, which is put in where it is left out"
        )
    return label_max


def _write_limit(body: bytes, path: MemberPath, limit: int) -> bytes:
    try:
        return _set_member(body, path, b"%d" % limit)
    except json_splice.InvalidJsonObject as failure:
        raise InvalidRequest(f"the body {failure}") from None


def _set_member(data: bytes, path: MemberPath, value: bytes) -> bytes:
    name = path[0]
    splice = json_splice.find_members(data, (name,))
    span = splice.spans.get(name)
    if len(path) > 1:
        inner = b"{}" if span is None or data[slice(*span)] == b"null" else data[slice(*span)]
        value = _set_member(inner, path[1:], value)
    return (
        json_splice.add_member(data, splice, name, value)
        if span is None
        else json_splice.replace_span(data, span, value)
    )
