"""A schema with every kind of field, for tests of the configuration's reader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import pytest
from price_keeper.config.config_reader import RuleViolation, constraints, read_text
from price_keeper.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class Hue:
    degrees: int

    @classmethod
    def from_text(cls, text: str) -> Hue:
        if not text.endswith("deg"):
            raise ValueError("expected degrees, such as 90deg")
        return cls(int(text[:-3]))


def low_is_below_high(low: int, high: int) -> Iterator[RuleViolation]:
    if low > high:
        yield ("high",), f"below low, which is {low}"


@dataclass(frozen=True, slots=True)
class Everything:
    rules = (low_is_below_high,)

    name: str = "plain"
    note: str | None = "some"
    low: int = 1
    high: int = field(
        default=9, metadata=constraints(lambda number: None if number < 100 else "expected less than 100")
    )
    ratio: float = 0.5
    amount: Decimal = Decimal("1.5")
    is_on: bool = False
    size: Literal[8, 16] = 8
    color: Literal["red", "green", "blue"] = "red"
    hue: Hue | None = None
    numbers: tuple[int, ...] = ()
    points: tuple[Point, ...] = ()
    point: Point | None = None
    shades: dict[Literal["light", "dark"], int] = field(default_factory=dict)
    named: Mapping[str, Point] = field(
        default_factory=dict, metadata=constraints(keys=lambda name: None if name.islower() else "expected lower case")
    )
    free: dict[str, int] = field(default_factory=dict)
    hidden: str = field(
        default="", metadata=constraints(lambda text: "expected nothing" if text else None, private=True)
    )
    api_key_file: str | None = field(default=None, metadata=constraints(lambda text: "expected something else"))


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Everything = Everything()
    where: Point = Point(1)


def parse(text: str, environ: Mapping[str, str] | None = None, schema: Any = Everything) -> Any:
    return read_text(schema, text, "c.yaml", environ or {}, "APP__")


def problems(text: str, environ: Mapping[str, str] | None = None, schema: Any = Everything) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(text, environ, schema)
    return list(caught.value.problems)
