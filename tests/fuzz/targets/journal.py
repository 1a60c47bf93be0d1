"""Journals that are spoilt on the disk: each call counts once at most, as it was recorded or as it was taken to be."""

from __future__ import annotations

import logging
import shutil
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import orjson
from price_keeper.errors import JournalUnusable
from price_keeper.ledger.journal import Journal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, Receipt, UsageCounts
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment import SEGMENT_SUFFIX, decode_lines, encode_line
from price_keeper.ledger.ulid import UlidFactory

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

NOW = 1_795_003_200.0
NAMES = ("request", "price", "why", "tier", "")  # fmt: skip
TEXTS = ("H", "C", "E", "I", "R", "N", "S", "ORG#a", "premium",
         "DAY#20261118", "HOLD#h#DAY#20261118", "01J00000000000000000000000")  # fmt: skip
WORDS = (b'["I",1,0,1,1,5,[["ORG#a","call1","DAY#20261118",8]]]', b'["R",1,[1,0,0,0,0,0,0,0,7],{}]',
         b'["N",1]', b'["E","",0]',
         b'["S","01J00000000000000000000000",7,1,[[["ORG#a","c","DAY#20261118",8,1,0,0,0,0,0,0,0,7]]]]')  # fmt: skip

ENDS = (b'[["ORG#a","call7","DAY#20261118",8]]', b"[[]]", b"[[1,2,3,4]]", b"[1,0,0,0,0,0,0,0,7]", b"{}",
        b'[["a","b","c","8"]]')  # fmt: skip


@cache
def _place() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def one(data: bytes) -> None:
    reader = Reader(data)
    folder = Path(_place().name) / "journal"
    folder.mkdir(parents=True)
    logging.getLogger("price_keeper.recording").disabled = True
    try:
        with mock.patch("os.fsync"):  # that costs as much as all else here, and no power cut is tested
            if reader.byte() % 4 == 3:
                _of_strange_lines(reader, folder)
            else:
                _with_corrupted_lines(reader, folder)
    finally:
        logging.getLogger("price_keeper.recording").disabled = False
        shutil.rmtree(folder)


class Written:
    """A journal that a process left behind, and what is true of its calls: guesses and costs by their numbers."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        chance = count(1)
        journal = Journal(folder, UlidFactory(lambda: NOW, lambda size: next(chance).to_bytes(size)))
        self.guesses: dict[int, int] = {}
        self.costs: dict[int, int | None] = {}
        under_way: dict[int, int] = {}
        for number in range(1, 2 + reader.byte() % 12):
            self.guesses[number] = guess = 1000 + number
            account = ChargedCounters.from_counters([Counter("ORG#a", f"call{number}", "DAY#20261118", 8)])
            under_way[journal.write_intent(Intent(account, 0, 1, 1, guess))] = number
            step = reader.byte()
            if step % 4 < 3 and under_way:
                ended = sorted(under_way)[step // 4 % len(under_way)]
                call = under_way.pop(ended)
                self.costs[call] = cost = 2000 + call if step % 4 < 2 else None
                journal.record(ended, None if cost is None else Receipt(UsageCounts(requests=1, pico=cost)))
            if step >= 192:
                journal.seal()
        journal._segment.close()
        self.lines = {
            each for path in folder.glob(f"*{SEGMENT_SUFFIX}") for each in path.read_bytes().splitlines(keepends=True)
        }


def _with_corrupted_lines(reader: Reader, folder: Path) -> None:
    written = Written(reader, folder)
    is_corrupted = False
    for _ in range(reader.byte() % 4):
        paths = sorted(folder.glob(f"*{SEGMENT_SUFFIX}"))
        path = paths[reader.byte() % len(paths)]
        before = path.read_bytes()
        path.write_bytes(_corrupted(reader, before))
        is_corrupted |= path.read_bytes().rstrip(b"\0") != before
    new = {
        each for path in folder.glob(f"*{SEGMENT_SUFFIX}") for each in path.read_bytes().splitlines(keepends=True)
    } - written.lines
    if any(decode_lines(each).values for each in new):
        return  # a line that is good by its checksum and was never written
    counted = _recovered(folder)
    for call, (requests, pico) in counted.items():
        allowed = {written.guesses[call], written.costs.get(call)}
        holds(
            requests == 1 and pico in allowed, f"call {call} counts {requests} times with {pico}, not one of {allowed}"
        )
    if not is_corrupted:
        expected = {call: written.costs.get(call, guess) for call, guess in written.guesses.items()}
        same(
            {call: pico for call, (_, pico) in counted.items()},
            {call: pico for call, pico in expected.items() if pico},
            "calls",
        )


def _corrupted(reader: Reader, data: bytes) -> bytes:
    at, how = reader.number(2) % (len(data) + 1), reader.byte() % 8
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + bytes(reader.byte())
    if how == 2:
        return data[:at] + reader.some() + data[at:]
    if how == 3:
        return data[:at] + data[at + reader.byte() :]
    if how == 4:
        return data + b"\0" * (1 + reader.byte())
    lines = data.splitlines(keepends=True)
    if how == 5 and lines:
        del lines[at % len(lines)]
        return b"".join(lines)
    return data[:at] + bytes([data[at] ^ (1 << reader.byte() % 8)]) + data[at + 1 :] if at < len(data) else data + b"\n"


def _recovered(folder: Path) -> dict[int, tuple[int, int]]:
    """Twice, since a process may die behind the first time; both come to the same."""
    sums = []
    for _ in range(2):
        counted: dict[int, tuple[int, int]] = {}
        for sealed in recover(folder).sealed:
            for part in sealed.seal.parts:
                for counter, counts in part:
                    call = int(counter.label.removeprefix("call"))
                    before = counted.get(call, (0, 0))
                    counted[call] = before[0] + counts.requests, before[1] + counts.pico
        sums.append(counted)
    same(sums[1], sums[0], "recovered again")
    return sums[0]


def _of_strange_lines(reader: Reader, folder: Path) -> None:
    """Valid by their checksums, with arbitrary content: they cost no other line."""
    good = orjson.dumps(["I", 999, 0, 1, 1, 5, [["ORG#a", "call999", "DAY#20261118", 8]]])
    lines = [encode_line(b'["H","a","",1]'), encode_line(b'["E","",0]')][: reader.byte() % 3]
    for _ in range(reader.byte() % 8):
        lines.append(encode_line(_strange(reader)))
    is_sealed = any(orjson.loads(each[9:])[:1] == ["S"] for each in lines if _is_list(each[9:]))
    lines.insert(reader.byte() % (len(lines) + 1), encode_line(good))
    chance = count(1)
    ulid = UlidFactory(lambda: NOW, lambda size: next(chance).to_bytes(size)).new()
    (folder / f"{ulid}{SEGMENT_SUFFIX}").write_bytes(b"".join(lines))
    try:
        found = recover(folder)
    except JournalUnusable as refused:
        holds("another version" in str(refused), f"refused: {refused}")
        return
    sums = [each for sealed in found.sealed for part in sealed.seal.parts for each in part]
    for counter, counts in sums:
        holds([*map(type, counter)] == [str, str, str, int], f"no counter: {counter}")
        holds(all(type(number) is int for number in counts), f"no counts: {counts}")
    holds(all(type(sealed.seal.requests) is int for sealed in found.sealed), "no count of calls")
    labels = [counter.label for counter, _ in sums]
    is_named_elsewhere = b"999" in b"".join(each for each in lines if good not in each)
    holds("call999" in labels or is_sealed or is_named_elsewhere, f"lost: {lines}")


def _is_list(text: bytes) -> bool:
    try:
        return isinstance(orjson.loads(text), list)
    except orjson.JSONDecodeError:
        return False


def _strange(reader: Reader) -> bytes:
    if reader.byte() % 4 == 0:
        return reader.some()
    kind = reader.pick(("I", "R", "N", "C", "E", "S", "H", "?"))
    values = [f'"{kind}"'.encode(), *(b"%d" % reader.byte() for _ in range(reader.byte() % 6))]
    if reader.byte() % 2:
        values.append(document(reader, NAMES, TEXTS))
    if reader.byte() % 2:
        values.append(reader.pick(ENDS))
    return b"[" + b",".join(values) + b"]"
