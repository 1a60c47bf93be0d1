"""What a soak was to show, and what it showed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.speed.scaling_results import Goal


@dataclass
class Verdict:
    goals: list[Goal] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    log_findings: list[str] = field(default_factory=list)  # by the logs

    def none(self, what: str, found: Sequence[object] | int) -> None:
        """Of what there must not be any."""
        count = found if isinstance(found, int) else len(found)
        some = "" if isinstance(found, int) or not found else f", such as {'; '.join(map(str, found[:3]))}"
        self.goals.append(Goal(what, "none", f"{count}{some}", count == 0))

    def holds(self, what: str, wanted: str, reached: object, *, is_so: bool) -> None:
        self.goals.append(Goal(what, wanted, str(reached), is_so))

    @property
    def is_good(self) -> bool:
        return all(goal.is_reached for goal in self.goals)
