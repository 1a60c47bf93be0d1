"""The page and its plots, made from what was measured, so that both can be improved without measuring again.

    python -m bench.speed.report [FOLDER]

Beside results.json there may be others, of what is measured elsewhere: `control.json`, `scaling.json` and
`hour.json`, each

    {"goals":  [{"goal", "wanted", "reached", "is_reached"}],
     "tables": [{"title", "note", "columns": [...], "rows": [[...], ...]}],
     "plots":  [{"title", "x", "y", "series": [{"name", "points": [[x, y], ...]}], "log": false}]}

of which everything may be missing. A plot with `log` has both axes logarithmic.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.speed import goals, sections
from bench.speed.figures import Figures
from bench.speed.flame import shares
from bench.speed.goals import Goal
from bench.speed.plots import Line, lines

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "performance"
RESULTS, FLAME = "results.json", "flame.svg"
FURTHER = {"control": "The control API", "scaling": "Many orgs, many callers, many streams", "hour": "A long load"}


def write(folder: Path) -> Path:
    """The page stands beside the folder and has its name."""
    figures = Figures.from_json(json.loads((folder / RESULTS).read_text()))
    further = {name: json.loads(path.read_text()) for name in FURTHER if (path := folder / f"{name}.json").exists()}
    flame = (folder / FLAME).read_text() if (folder / FLAME).exists() else None
    page, plots = made(figures, further, folder.name, flame)
    for path in folder.glob("*.svg"):
        if path.name != FLAME:
            path.unlink()  # plots that are not drawn any more
    for name, svg in plots.items():
        (folder / name).write_text(svg)
    target = folder.with_suffix(".md")
    target.write_text(page)
    return target


def made(
    figures: Figures, further: dict[str, dict[str, Any]], folder: str, flame: str | None = None
) -> tuple[str, dict[str, str]]:
    """The page, and each plot by the name of its file."""
    reached = goals.reached(figures)
    for told in further.values():
        reached += [Goal(**goal) for goal in told.get("goals", [])]
    parts = [sections.opening(figures), _goals(reached)]
    plots: dict[str, str] = {}
    for section in sections.all_of(figures):
        parts.append(f"## {section.title}\n\n{section.text}".rstrip())
        parts += [_picture(name, folder, title) for name, title, _ in section.plots]
        plots |= {name: svg for name, _, svg in section.plots}
        parts += [table(columns, rows) for columns, rows in section.tables]
    for name, told in further.items():
        text, drawn = _further(name, told, folder)
        parts.append(text)
        plots |= drawn
    if flame is not None:
        parts += [sections.FLAME, _picture(FLAME, folder, "flame graph of the loaded sidecar"), sections.STEPS]
        parts.append(table(["step", "share"], [[step, f"{share:.0%}"] for step, share in shares(flame).items()]))
        parts += [sections.LIMIT, sections.against_python(figures)]
    parts.append(sections.closing(figures, folder))
    return "\n\n".join(part for part in parts if part) + "\n", plots


def _goals(reached: Sequence[Goal]) -> str:
    words = {True: "yes", False: "**no**", None: "-"}
    rows = [[goal.goal, goal.wanted, goal.reached, words[goal.is_reached]] for goal in reached]
    text = "With SDK headers, unless it says bare headers; as ratios (x) within one run."
    return f"## Goals\n\n{text}\n\n" + table(["goal", "wanted", "measured", "reached"], rows)


def _further(name: str, told: dict[str, Any], folder: str) -> tuple[str, dict[str, str]]:
    parts = [f"## {FURTHER[name]}", "Measured in a run of its own."]
    drawn: dict[str, str] = {}
    for each in told.get("plots", []):
        file = f"{name}-{re.sub(r'[^a-z0-9]+', '-', each['title'].lower()).strip('-')}.svg"
        series = [Line(line["name"], [(x, y) for x, y in line["points"]]) for line in each["series"]]
        is_log = bool(each.get("log"))
        drawn[file] = lines(each["title"], each["x"], each["y"], series, log_x=is_log, log_y=is_log)
        parts.append(_picture(file, folder, each["title"]))
    for each in told.get("tables", []):
        parts.append(f"**{each['title']}.** {each.get('note', '')}".rstrip())
        parts.append(table(each["columns"], each["rows"]))
    return "\n\n".join(parts), drawn


def _picture(name: str, folder: str, title: str) -> str:
    return f"![{title}]({folder}/{name})"


def table(columns: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    head = [[str(each) for each in columns], ["---"] * len(columns)]
    cells = [["" if cell is None else _cell(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *cells])


def _cell(cell: object) -> str:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return f"{cell:,}"
    return str(cell).replace("|", "\\|")


def as_text(figures: Figures) -> str:
    """For a terminal: the goals, and what was left out."""
    lines_ = [f"{goal.goal}: {goal.reached}; wanted {goal.wanted}" for goal in goals.reached(figures)]
    return "\n".join([*lines_, *(f"left out: {line}" for line in figures.left_out)])


if __name__ == "__main__":
    print(f"written: {write(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else FOLDER)}")
