"""What a measurement came to, in the form in which it is kept: tables, curves, and what was to be reached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    title: str
    x: str
    y: str
    series: Sequence[Series]
    log: bool = False


@dataclass(frozen=True)
class Goal:
    goal: str
    wanted: str
    reached: str
    is_reached: bool


@dataclass
class Results:
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.told(), indent=1) + "\n")

    def print(self) -> None:
        for table in self.tables:
            print(f"\n{table.title}\n{table.note}")
            lines = [[str(cell) for cell in row] for row in (table.columns, *table.rows)]
            widths = [max(len(line[place]) for line in lines) for place in range(len(table.columns))]
            for line in lines:
                print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        for goal in self.goals:
            print(f"{'reached' if goal.is_reached else 'MISSED'}: {goal.goal}: {goal.wanted} wanted, {goal.reached}")


def rounded(value: float, digits: int = 3) -> float:
    """To so many significant digits: more would be noise."""
    return float(f"{value:.{digits}g}")
