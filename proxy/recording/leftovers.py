"""What a process that is no more left in a journal: read, brought to its end, and sealed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.recording.entries import FORMAT, Account, Intent, Kind, Receipt, Tally
from proxy.recording.journal import Sealed
from proxy.recording.lines import lines_in
from proxy.recording.seal import Seal
from proxy.recording.segment import SUFFIX, Segment
from proxy.recording.ulid import is_ulid

_log = logging.getLogger("proxy.recording")


@dataclass(slots=True)
class Found:
    """A segment as it lies there. `open` are the calls of which it does not say what became."""

    path: Path
    ulid: str
    before: str = ""
    is_ready: bool = False
    seal: Seal | None = None
    spoilt: int = 0
    end: int = 0
    open: dict[int, Intent] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    _accounts: dict[bytes, Account] = field(default_factory=dict)

    def take(self, values: list[Any]) -> None:
        match values[0]:
            case Kind.HEAD:
                self.before = values[2]
                if values[3] != FORMAT:
                    raise ValueError(f"{self.path} is a journal of another version, {values[3]}")
            case Kind.CARRIED:
                self.open[values[1]] = self._intent(values)
            case Kind.SEAL:
                self.seal = Seal.from_values(values)
            case _:
                self.is_ready = True  # whatever became of the line that says so
                self._take_of_ready(values)

    def _take_of_ready(self, values: list[Any]) -> None:
        match values[0]:
            case Kind.INTENT:
                self.open[values[1]] = self._intent(values)
            case Kind.RECORD:
                self._settle(values[1], Receipt.from_values(values))
            case Kind.NOTHING:
                self.open.pop(values[1], None)

    def _intent(self, values: list[Any]) -> Intent:
        """Calls of one account share it, as they did when they were made: there may be a million of them."""
        intent = Intent.from_values(values)
        intent.account = self._accounts.setdefault(intent.account.fragment, intent.account)
        return intent

    def _settle(self, number: int, receipt: Receipt) -> None:
        intent = self.open.pop(number, None)
        if intent is not None:
            self.tally.add(intent.account, receipt.counts)


@dataclass(slots=True)
class Leftovers:
    """What is to be flushed, the oldest first, and how much of it was found how."""

    sealed: list[Sealed] = field(default_factory=list)
    spoilt: int = 0
    estimated: int = 0
    newest: str = ""  # of the segments there were


def recover(folder: Path) -> Leftovers:
    """Under the journal's lock. Doing it again, after being killed in the middle, comes to the same. Raises OSError."""
    left = Leftovers()
    found = list(_found_in(folder))
    carried_on = {each.before for each in found if each.is_ready}
    for each in found:
        left.spoilt += each.spoilt
        left.newest = each.ulid
        if each.seal is not None:
            left.sealed.append(Sealed(each.seal, each.path, is_left_over=True))
        elif not each.is_ready:
            each.path.unlink()  # it was being begun; the one before it still says all that it would have said
        else:
            if each.ulid in carried_on:
                each.open.clear()  # the next one says of them what is to be said
            left.estimated += len(each.open)
            left.sealed += _brought_to_its_end(each)
    if left.spoilt or left.estimated:
        _log.warning(
            "the journal in %s: %d calls whose end is unknown count as estimated; %d lines were torn",
            folder,
            left.estimated,
            left.spoilt,
        )
    return left


def _found_in(folder: Path) -> Iterator[Found]:
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        if is_ulid(path.stem):
            yield read(path)


def read(path: Path) -> Found:
    lines = lines_in(path.read_bytes())
    found = Found(path, path.stem, spoilt=lines.spoilt, end=lines.end)
    for values in lines.values:
        found.take(values)
    return found


def _brought_to_its_end(found: Found) -> list[Sealed]:
    os.truncate(found.path, found.end)
    if not (found.open or found.tally.requests):
        found.path.unlink()
        return []
    segment = Segment(found.path.parent, found.ulid)
    try:
        for number, intent in found.open.items():
            receipt = Receipt(intent.guess, {"why": "unknown"})
            segment.append(receipt.content(number))
            found.tally.add(intent.account, receipt.counts)
        seal = Seal.of(found.ulid, found.tally)
        segment.append(seal.content())
        segment.sync()
    finally:
        segment.close()
    return [Sealed(seal, found.path, is_left_over=True)]
