"""A bit that flips in a journal, and a start without room on the disk, cost no call but one whose line is spoilt."""

from __future__ import annotations

from pathlib import Path

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from price_keeper.errors import JournalFull
from price_keeper.ledger.journal import SealedSegment, SegmentPart
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX

from tests.property.test_journal import SCOPES, Machine
from tests.support.effort import tries


class Corrupted(Machine):
    """`unread` are calls whose intent may be gone, `unended` those that cost nothing by a line that may be gone."""

    def __init__(self) -> None:
        super().__init__()
        self.flip: tuple[int, int, int, int] | None = None
        self.flipped: set[str] = set()
        self.unread: set[int] = set()
        self.unended: set[int] = set()
        self.sent: dict[str, tuple[SegmentPart, ...]] = {}

    @rule(
        file=st.integers(0, 9),
        line=st.integers(-3, 9),
        place=st.integers(-1, 300),
        bit=st.integers(0, 7),
        dies_again=st.integers(0, 2),
    )
    def rot(self, file: int, line: int, place: int, bit: int, dies_again: int) -> None:
        """In the middle of a file, as a disk may do it; found by the next process."""
        self.flip = (file, line, place, bit)
        self.die(0, dies_again)

    @rule(
        calls=st.integers(2, 4),
        ended=st.lists(st.booleans(), max_size=2),
        file=st.integers(0, 1),
        line=st.integers(-1, 5),
        place=st.integers(-1, 300),
        dies_again=st.integers(0, 2),
    )
    def rot_what_is_carried(
        self, calls: int, ended: list[bool], file: int, line: int, place: int, dies_again: int
    ) -> None:
        """Soon after a seal, with the segment before still there."""
        for _ in range(calls):
            self.send(SCOPES[0])
        if self.under_way:
            self.end(0, True)
        self.seal()
        for costs in ended[: len(self.under_way)]:
            self.end(0, costs)
        self.rot(file, line, place, 0, dies_again)

    def _tear(self, cut: int) -> None:
        super()._tear(cut)
        paths = sorted(self.folder.glob(f"*{SEGMENT_SUFFIX}"))
        if self.flip is not None and self.flipped.isdisjoint(path.stem for path in paths):  # one bit at a time
            file, line, place, bit = self.flip
            self._flip(paths[-1 - file % len(paths)], line, place, bit)
        self.flip = None

    def _flip(self, path: Path, line: int, place: int, bit: int) -> None:
        lines = path.read_bytes().split(b"\n")[:-1]
        if not lines:
            return
        self.flipped.add(path.stem)
        at = line % len(lines)
        offset = place % (len(lines[at]) + 1)
        self._note(lines, {at, at + 1} if offset == len(lines[at]) else {at})
        with path.open("r+b") as disk:
            start = sum(len(each) + 1 for each in lines[:at]) + offset
            disk.seek(start)
            value = disk.read(1)[0] ^ 1 << bit
            disk.seek(start)
            disk.write(bytes([value]))

    def _note(self, lines: list[bytes], hit: set[int]) -> None:
        values = [orjson.loads(each[9:]) for each in lines]
        calls = {each[1]: int(each[-1][0][1].removeprefix("call")) for each in values if each[0] in "CI"}
        is_alone = not (self.folder / f"{values[0][2]}{SEGMENT_SUFFIX}").exists()
        for number, each in enumerate(values):
            if number in hit and (each[0] == "I" or (each[0] == "C" and is_alone)):
                self.unread.add(calls[each[1]])
            if number in hit and each[0] == "N" and each[1] in calls:
                self.unended.add(calls[each[1]])

    @rule(room=st.integers(0, 400), kills=st.lists(st.booleans(), max_size=4))
    def start_on_a_full_disk(self, room: int, kills: list[bool]) -> None:
        """Segments that cannot be sealed are sent as they are, oldest first, perhaps by a process killed on the way."""
        self.lost |= {self.call_of[number] for number in self.journal._open}
        self.journal._segment.close()
        self.under_way, self.call_of = [], {}
        self.disk.room = room
        self.sealed = recover(self.folder).sealed
        while not self._has_begun():
            if not self.sealed:
                self.disk.room = None
                continue
            self._count(self.sealed[0])
            if kills and kills.pop():
                self.sealed = recover(self.folder).sealed
            else:
                self.sealed.pop(0).discard()
        self.disk.room = None

    def _has_begun(self) -> bool:
        try:
            for sealed in self.sealed:
                sealed.write_seal()
            self._opened()
        except (JournalFull, OSError):
            return False
        return True

    def _count(self, sealed: SealedSegment) -> None:
        """Once, by its marker; and it must come to the same each time."""
        known = self.sent.setdefault(sealed.seal.ulid, sealed.seal.parts)
        assert known == sealed.seal.parts
        if known is sealed.seal.parts:
            super()._count(sealed)

    def _check(self) -> None:
        self.journal.retry_unwritten()
        wanted = self.recorded | self.lost | {self.call_of[number] for number in self.journal._open}
        self.die(0, 0)
        for sealed in self.sealed:
            self._count(sealed)
        counted = {call for call, times in self.counted.items() if times}
        assert wanted - counted <= self.unread
        assert counted - wanted <= self.unended
        self.nothing_counts_twice()


TestCorruptedJournal = Corrupted.TestCase
TestCorruptedJournal.settings = settings(max_examples=tries(100), stateful_step_count=50)
