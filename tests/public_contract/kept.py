"""What is kept: the rows of the store's file, and the files of the journal's folder."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from price_keeper.alerts.alert_outbox import ALERT_SUFFIX
from price_keeper.budgets.budget_snapshot import TEMPORARY_FILE_PREFIX

from tests.public_contract.shapes import fields_of, positions, without_ids

_LINE = 9  # a checksum and a space stand before the JSON of a line


def tables(store: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(store)) as database:
        names = [
            name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table' ORDER BY name")
        ]
        return {name: _table(database, name) for name in names}


def _table(database: sqlite3.Connection, name: str) -> dict[str, Any]:
    columns = [f"{column} {kind}" for _, column, kind, *_ in database.execute(f'PRAGMA table_info("{name}")')]
    found: dict[str, Any] = {"columns": ", ".join(columns)}
    if "item TEXT" in columns:
        rows: dict[str, list[Any]] = defaultdict(list)
        for pk, sk, item in database.execute(f'SELECT pk, sk, item FROM "{name}"'):
            rows[" / ".join(without_ids(each) for each in (pk, sk) if each)].append(json.loads(item))
        found["rows"] = {key: fields_of(items) for key, items in sorted(rows.items())}
    return found


def row_attributes(store: Path) -> set[str]:
    """Each attribute of each kind of row, as `table: key attribute`."""
    return {
        f"{table}: {key} {attribute}"
        for table, rows in tables(store).items()
        for key, attributes in rows.get("rows", {}).items()
        for attribute in attributes
    }


def journal(folder: Path) -> dict[str, Any]:
    """By the kind of file, and there by the word that tells the kind of line: its places, and the fields of objects."""
    found: dict[str, dict[str, list[list[Any]]]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir():  # of alerts that wait for their receiver, each a file of one object
            waiting = [[json.loads(each.read_bytes())] for each in path.glob(f"*{ALERT_SUFFIX}")]
            found[f"{path.name}/{{time}}-{{uuid}}"] = {"the file": waiting}
            continue
        if path.name.startswith(TEMPORARY_FILE_PREFIX):  # what the process was writing when it was killed
            continue
        kind = "notes-{worker}" if path.name.startswith("notes-") else without_ids(path.name)
        lines = found.setdefault(kind, {})
        for values in lines_of(path):
            lines.setdefault(_word(kind, values), []).append(values)
    return {kind: {word: _lines(each) for word, each in sorted(lines.items())} for kind, lines in found.items()}


def _word(kind: str, values: list[Any]) -> str:
    """A line of a segment begins with it, and one of the notes has it after the time; a hard budget's has none."""
    if kind.startswith("notes-"):
        return next(each for each in values if isinstance(each, str))
    return str(values[0]) if kind.endswith(".seg") else "line"


def _lines(lines: list[list[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"places": sorted(set(map(positions, lines)))}
    objects = [each for values in lines for each in values if isinstance(each, dict)]
    return found | ({"fields": fields_of(objects)} if objects else {})


def lines_of(path: Path) -> list[list[Any]]:
    whole = (line for line in path.read_bytes().split(b"\n") if line.strip(b"\0"))
    return [json.loads(line[_LINE:]) for line in whole if line[_LINE:].startswith(b"[")]


def words_of(folder: Path) -> set[str]:
    """With which lines of the segments there begin."""
    return {values[0] for path in folder.glob("*.seg") for values in lines_of(path)}
