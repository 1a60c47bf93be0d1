"""Types of the fields of a JSON body: each parses a value and describes itself as JSON Schema. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from price_keeper.budgets.effective_settings import format_value
from price_keeper.control.api_constants import MAX_ECHOED_NAME_LENGTH
from price_keeper.control.api_errors import invalid_request

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of one field of a body."""

    expected: str  # as an error message says it
    schema: Mapping[str, Any]
    convert: Callable[[Any], Any]  # the value as the handler uses it; None for a value that is not of this type
    is_secret: bool = False  # then error messages do not quote the value, which may be a mistyped secret

    def parse(self, value: Any) -> Any:
        """The value as the handler uses it. Raises a ValueError that says what is expected."""
        converted = self.convert(value)
        if converted is None:
            found = "something else" if self.is_secret else format_value(value)
            raise ValueError(f"expected {self.expected}, found {found}")
        return converted


def pattern_field(pattern: str, max_length: int, expected: str, *, is_secret: bool = False) -> FieldType:
    def convert(value: Any) -> str | None:
        is_short = isinstance(value, str) and len(value) <= max_length
        return value if is_short and re.fullmatch(pattern, value, re.ASCII) else None

    schema = {"type": "string", "pattern": f"^{pattern}$", "maxLength": max_length}
    return FieldType(expected, schema, convert, is_secret)


def integer_field(minimum: int, maximum: int) -> FieldType:
    return FieldType(
        f"a whole number from {minimum} to {maximum}",
        {"type": "integer", "minimum": minimum, "maximum": maximum},
        lambda value: value if type(value) is int and minimum <= value <= maximum else None,
    )


def free_text_field(max_length: int) -> FieldType:
    """Text written by a person."""

    def convert(value: Any) -> str | None:
        return value if isinstance(value, str) and 0 < len(value) <= max_length and value.isprintable() else None

    schema = {"type": "string", "minLength": 1, "maxLength": max_length}
    return FieldType(f"1 to {max_length} printable characters", schema, convert)


def choice_field(choices: Sequence[str]) -> FieldType:
    return FieldType(
        f"one of {', '.join(choices)}",
        {"type": "string", "enum": list(choices)},
        lambda value: value if isinstance(value, str) and value in choices else None,
    )


def _parse_timestamp(value: Any) -> float | None:
    try:
        is_timestamp = isinstance(value, str) and _TIMESTAMP.fullmatch(value)
        return datetime.fromisoformat(value).timestamp() if is_timestamp else None
    except (ValueError, OverflowError):
        return None


TIMESTAMP_FIELD = FieldType(
    "a time with its zone, as 2026-11-18T15:00:00Z", {"type": "string", "format": "date-time"}, _parse_timestamp
)


def unchecked_field(schema: Mapping[str, Any]) -> FieldType:
    """A field that the handler checks itself; only its schema is declared here."""
    return FieldType("anything", schema, lambda value: value)


def make_nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an optional field, for which null means the same as leaving it out."""
    more = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [schema["type"], "null"], **more} if "type" in schema else dict(schema)


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields of a JSON object; unknown fields are rejected."""

    types: Mapping[str, FieldType]
    required: tuple[str, ...]

    def parse(self, body: Any, path_prefix: str = "") -> dict[str, Any]:
        """The parsed values of the fields that are present and not null. Raises an ApiError that lists the mistakes."""
        if not isinstance(body, Mapping):
            raise invalid_request(
                "the body cannot be used", (path_prefix.rstrip("."), f"expected an object, found {format_value(body)}")
            )
        unknown = (name for name, value in body.items() if value is not None and name not in self.types)
        given = {name: body[name] for name in self.types if body.get(name) is not None}
        mistakes = [(name, "required, but missing") for name in self.required if name not in given]
        mistakes += [(name[:MAX_ECHOED_NAME_LENGTH], "unknown") for name in unknown]
        values = {}
        for name, field_type in self.types.items():
            try:
                if name in given:
                    values[name] = field_type.parse(given[name])
            except ValueError as failure:
                mistakes.append((name, str(failure)))
        if mistakes:
            raise invalid_request(
                "the body cannot be used", *((f"{path_prefix}{name}", text) for name, text in mistakes)
            )
        return values

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                name: dict(kind.schema) if name in self.required else make_nullable(kind.schema)
                for name, kind in self.types.items()
            },
            "required": list(self.required),
            "additionalProperties": False,
        }
