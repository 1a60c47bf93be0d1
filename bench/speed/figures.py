"""Figures by name, each measured once a round, and what is said of them. Pure.

A name is a path: `http1/64/nginx/per_second` is what nginx served over HTTP/1.1 to 64 connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, the lowest and the highest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass
class Figures:
    about: dict[str, str] = field(default_factory=dict)  # the machine, the versions, the length of the run
    values: dict[str, list[float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # what could not be measured, and why

    def add(self, *path: object, **figures: float | None) -> None:
        for name, value in figures.items():
            if value is not None:
                self.values.setdefault("/".join(str(each) for each in (*path, name)), []).append(value)

    def spread(self, *path: object) -> Spread | None:
        values = self.values.get("/".join(str(each) for each in path))
        return Spread.of(values) if values else None

    def middle(self, *path: object) -> float | None:
        spread = self.spread(*path)
        return None if spread is None else spread.middle

    def is_known(self, *path: object) -> bool:
        """Whether there is anything under a path."""
        beginning = "/".join(str(each) for each in path) + "/"
        return any(name.startswith(beginning) for name in self.values)

    def as_json(self) -> dict[str, Any]:
        return {"about": self.about, "left_out": self.left_out, "values": self.values}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Figures:
        return cls(told["about"], told["values"], told["left_out"])


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all do not pass."""
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)  # rounded up
    return ordered[max(0, int(rank) - 1)]


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
