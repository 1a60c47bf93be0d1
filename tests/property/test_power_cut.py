"""Whatever a power cut leaves of a journal, what was synced counts once, and what was not counts once or not at all.

The disk is a strict one: of what was not synced it keeps any pages, old or new, and a name that was made or removed
is there or not, as long as its folder was not synced.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from price_keeper.ledger.journal import SealedSegment
from price_keeper.ledger.recovery import recover

from tests.property.test_journal import SCOPES, Machine
from tests.support.effort import tries

PAGE = 4096
FSYNC, UNLINK = os.fsync, os.unlink
BEGUN, ENDED = "begun", "ended"


class Platter:
    """What is really on the disk of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: set[str] = set()  # as last synced
        self._contents: dict[str, bytes] = {}  # no name is ever used again
        self._removed: dict[str, bytes] = {}  # with their content

    def fsync(self, file: int) -> None:
        FSYNC(file)
        node, names = os.fstat(file).st_ino, {each.stat().st_ino: each for each in self._folder.iterdir()}
        if node == self._folder.stat().st_ino:
            self._names, self._removed = {each.name for each in names.values()}, {}
        elif node in names:
            self._contents[names[node].name] = names[node].read_bytes()

    def unlink(self, path: Path, *, dir_fd: int | None = None) -> None:
        if Path(path).parent == self._folder and Path(path).exists():
            self._removed[Path(path).name] = Path(path).read_bytes()
        UNLINK(path, dir_fd=dir_fd)

    def lose_power(self, chance: random.Random) -> None:
        now = {path.name: path.read_bytes() for path in self._folder.iterdir()}
        for name, content in {**now, **self._removed}.items():
            is_there = name in now if (name in now) == (name in self._names) else chance.random() < 0.5
            (self._folder / name).unlink(missing_ok=True)
            if is_there:
                (self._folder / name).write_bytes(_mixed(self._contents.get(name, b""), content, chance))
        self._names, self._removed = {each.name for each in self._folder.iterdir()}, {}
        self._contents = {name: (self._folder / name).read_bytes() for name in self._names}


def _mixed(old: bytes, new: bytes, chance: random.Random) -> bytes:
    size, share = chance.choice((len(old), len(new))), chance.choice((0.0, 0.5, 1.0))
    pages = []
    for at in range(0, size, PAGE):
        page = (new if chance.random() < share else old)[at : at + PAGE]
        pages.append(page.ljust(PAGE, b"\0"))
    return b"".join(pages)[:size]


class Powered(Machine):
    def _opened(self) -> None:
        if not hasattr(self, "platter"):
            self.platter = Platter(self.folder)
            self.patches.enter_context(mock.patch("os.fsync", self.platter.fsync))
            self.patches.enter_context(mock.patch("os.unlink", self.platter.unlink))
            self.loose: dict[str, set[tuple[str, int]]] = defaultdict(set)  # by segment: what was written, not synced
            self.may: set[int] = set()  # calls that count once or not at all
            self.sent: set[str] = set()  # the store knows their markers
        super()._opened()

    @property
    def _ulid(self) -> str:
        return self.journal._segment.ulid

    @rule(scope=st.sampled_from(SCOPES))
    def send(self, scope: str) -> None:
        known, ulid = set(self.call_of), self._ulid
        super().send(scope)
        self.loose[ulid] |= {(BEGUN, self.call_of[number]) for number in set(self.call_of) - known}

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 10**6), costs=st.booleans())
    def end(self, which: int, costs: bool) -> None:
        call = self.call_of[self.under_way[which % len(self.under_way)]]
        super().end(which, costs)
        self.loose[self._ulid].add((ENDED, call))

    @rule()
    def sync(self) -> None:
        self.journal.sync()
        self.loose.pop(self._ulid, None)

    def fill_disk(self, room: int | None) -> None:
        """Not here: `test_journal` does."""

    @rule(scope=st.sampled_from(SCOPES))
    def call(self, scope: str) -> None:
        """From its beginning to its end."""
        self.send(scope)
        self.end(len(self.under_way) - 1, True)

    @precondition(lambda self: self.sealed)
    @rule()
    def secure(self) -> None:
        """And sent later, as when the store is away."""
        sealed = self.sealed[0]
        if not sealed.is_seal_written:
            sealed.write_seal()
            for each in (sealed.path, sealed.next_path):
                self.loose.pop(each.stem if each is not None else "", None)

    def _count(self, sealed: SealedSegment) -> None:
        if sealed.seal.ulid not in self.sent:
            self.sent.add(sealed.seal.ulid)
            super()._count(sealed)

    @precondition(lambda self: self.sealed)
    @rule()
    def flush(self) -> None:
        self.secure()
        super().flush()

    @rule(cut=st.integers(0, 9), dies_again=st.integers(0, 3))
    def die(self, cut: int, dies_again: int) -> None:
        super().die(cut, dies_again)
        self.loose.clear()  # the next process syncs everything that it finds

    @rule(seed=st.integers(0, 10**9))
    def lose_power(self, seed: int) -> None:
        self.disk.room = None
        under_way = {self.call_of[number] for number in self.journal._open}
        self.journal._segment.close()
        self.platter.lose_power(random.Random(seed))
        loose = {each for events in self.loose.values() for each in events}
        self.may |= {call for what, call in loose if what is BEGUN or call not in self.recorded}
        self.lost |= under_way
        self.loose.clear()
        self.sealed = recover(self.folder).sealed
        self.under_way, self.call_of = [], {}
        Machine._opened(self)

    def _check(self) -> None:
        self.journal.retry_unwritten()
        lost = self.lost | {self.call_of[number] for number in self.journal._open}
        Machine.die(self, 0, 0)
        for sealed in self.sealed:
            self._count(sealed)
        counted = {call for call, times in self.counted.items() if times}
        assert (self.recorded | lost) - self.may <= counted <= self.recorded | lost | self.may
        self.nothing_counts_twice()


TestPowered = Powered.TestCase
TestPowered.settings = settings(max_examples=tries(100), stateful_step_count=50, deadline=None)
