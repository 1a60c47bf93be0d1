"""The form of values without their content: names and types; what differs from run to run is left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Fields = dict[str, str]

_VARIES = (
    (r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", "{uuid}"),
    (r"\b[0-9A-HJKMNP-TV-Z]{26}\b", "{ulid}"),
    (r"\b[0-9a-f]{64}\b", "{sha256}"),
    (r"\b[0-9a-f]{32}\b", "{hex}"),
    (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z?", "{time}"),
    (r"\b\d{4}-\d\d-\d\d\b", "{date}"),
    (r"(DAY|ACTIVE)#\d{8}", r"\1#{date}"),
    (r"SH#\d+", "SH#{number}"),
    (r"PART#\d+", "PART#{number}"),
    (r"PCT#\d+", "PCT#{number}"),
    (r"\bAPP#[a-z-]+", "APP#{app}"),
    (r"PROFILE#[a-z-]+#[a-z-]+", "PROFILE#{app}#{label}"),
    (r"(LABEL|BUCKET#HARD|HOLD)#[a-z-]+", r"\1#{label}"),
    (r"CONTROL#.*", "CONTROL#{caller}"),
    (r"REQ#\{uuid\}#[a-z-]+#[\w-]+", "REQ#{uuid}#{app}#{request}"),
    (r"-app-[a-z-]+$", "-app-{app}"),
    (r"^[\w.:-]+@[a-z]+-[a-z]+-\d$", "{model}@{region}"),
)
_LABELS = {"premium", "standard", "economy", "own", "chat", "film", "guardrails", "async-jobs"}


def without_ids(text: str) -> str:
    for pattern, name in _VARIES:
        text = re.sub(pattern, name, text)
    return text


def fields_of(values: Iterable[Any]) -> Fields:
    """Of JSON values of one kind: the path of each field, and its types."""
    found: dict[str, set[str]] = defaultdict(set)
    for value in values:
        for path, kind in _walked(value, ""):
            found[path or "whole"].add(kind)
    return {path: " | ".join(sorted(kinds)) for path, kinds in sorted(found.items())}


def _walked(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and len(value) == 1 and (kept := _stored(value)) is not None:
        yield from kept if isinstance(kept, list) else _walked(kept, path)
    elif isinstance(value, dict):
        if path:
            yield path, "object"
        for name, each in value.items():
            key = "{label}" if name in _LABELS else without_ids(name)
            yield from _walked(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        yield path, "list"
        for each in value:
            yield from _walked(each, f"{path}[]")
    else:
        yield path, kind_of(value)


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "object"
    kinds = ((bool, "boolean"), (int, "number"), (float, "number"), (str, "string"))
    return next(name for kind, name in kinds if isinstance(value, kind))


def _stored(value: dict[str, Any]) -> Any:
    """How the embedded store writes what JSON has no form for: numbers, maps, bytes."""
    ((tag, inner),) = value.items()
    if tag == "N" and isinstance(inner, str):
        return 0
    if tag == "B" and isinstance(inner, str):
        return "bytes"
    return inner if tag == "M" and isinstance(inner, dict) else None


def positions(values: list[Any]) -> str:
    """Of a line of the journal, whose fields are known by their places; lists in it by their first member."""
    return "[" + ", ".join(_position(value) for value in values) + "]"


def _position(value: Any) -> str:
    if isinstance(value, list):
        if value and all(isinstance(each, list) for each in value):
            return "[" + " | ".join(sorted({_position(each) for each in value})) + ", …]"
        return positions(value)
    return kind_of(value)
