"""Types of the fields of a JSON body: each parses a value and describes itself as JSON Schema. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from price_keeper.budgets.effective_settings import format_value
from price_keeper.control.api_constants import MAX_ECHOED_NAME_LENGTH
from price_keeper.control.api_errors import invalid_request

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)", re.ASCII)


class FieldType(Protocol):
    """The type of one field of a body."""

    def parse(self, value: Any) -> Any:
        """The value as the handler uses it. Raises a ValueError that says what is expected."""

    @property
    def schema(self) -> Mapping[str, Any]: ...


def make_nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an optional field, for which null means the same as leaving it out."""
    more = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [schema["type"], "null"], **more} if "type" in schema else dict(schema)


@dataclass(frozen=True, slots=True)
class PatternField:
    pattern: str
    max_length: int
    description: str
    is_secret: bool = False  # then error messages do not quote the value, which may be a mistyped secret

    def parse(self, value: Any) -> str:
        if (
            not isinstance(value, str)
            or len(value) > self.max_length
            or not re.fullmatch(self.pattern, value, re.ASCII)
        ):
            found = "something else" if self.is_secret else format_value(value)
            raise ValueError(f"expected {self.description}, found {found}")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self.pattern}$", "maxLength": self.max_length}


@dataclass(frozen=True, slots=True)
class IntegerField:
    minimum: int
    maximum: int

    def parse(self, value: Any) -> int:
        if type(value) is not int or not self.minimum <= value <= self.maximum:
            raise ValueError(
                f"expected a whole number from {self.minimum} to {self.maximum}, found {format_value(value)}"
            )
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}


@dataclass(frozen=True, slots=True)
class FreeTextField:
    """Text written by a person."""

    max_length: int

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= self.max_length or not value.isprintable():
            raise ValueError(f"expected 1 to {self.max_length} printable characters, found {format_value(value)}")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "minLength": 1, "maxLength": self.max_length}


@dataclass(frozen=True, slots=True)
class TimestampField:
    def parse(self, value: Any) -> float:
        try:
            if isinstance(value, str) and _TIMESTAMP.fullmatch(value):
                return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            pass
        raise ValueError(f"expected a time with its zone, as 2026-11-18T15:00:00Z, found {format_value(value)}")

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "format": "date-time"}


@dataclass(frozen=True, slots=True)
class ChoiceField:
    choices: tuple[str, ...]

    def parse(self, value: Any) -> str:
        if not isinstance(value, str) or value not in self.choices:
            raise ValueError(f"expected one of {', '.join(self.choices)}, found {format_value(value)}")
        return value

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.choices)}


@dataclass(frozen=True, slots=True)
class UncheckedField:
    """A field that the handler checks itself; only its schema is declared here."""

    schema: Mapping[str, Any]

    def parse(self, value: Any) -> Any:
        return value


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
