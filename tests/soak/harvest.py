"""What the journals of all sidecars say of each call, gathered into one file while they go on.

A segment is read when its owner has removed it, for then all of it is in the store.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from price_keeper.ledger.journal import SegmentSeal
from price_keeper.ledger.ledger_entries import ChargedCounters, Counter, Intent, LineKind, Receipt, UsageCounts
from price_keeper.ledger.segment import SEGMENT_SUFFIX, decode_lines

from tests.soak.fleet import Member

TABLES = """
create table receipts (sidecar text, segment text, scope text, label text, period text, started real, request text,
                       why text, pico integer, tokens text, scopes integer, is_held integer);
create table sums (segment text, scope text, label text, period text, shards integer, requests integer,
                   estimated integer, pico text);
create table ran (request text primary key, invocation text, model text, arrived real, done real, is_whole integer,
                  fault text, tokens text);
create table whole (request text);
create index by_request on receipts (request);
"""


class Harvest:
    def __init__(self, file: Path, members: list[Member], marker: bytes) -> None:
        self.db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self.db.execute("pragma synchronous = off")
        self.db.executescript(TABLES)
        self.segments = 0
        self.leaked_prompts = 0  # segments that hold a word of a prompt
        self._members = members
        self._marker = marker

    def gather(self) -> None:
        for member in self._members:
            for path in sorted(member.kept.glob(f"*{SEGMENT_SUFFIX}")):
                if path.stat().st_nlink == 1:  # else its owner may have been killed just before it went
                    self._take(member.name, path)
                    path.unlink()

    def _take(self, sidecar: str, path: Path) -> None:
        data = path.read_bytes()
        self.leaked_prompts += self._marker in data
        receipts, sums = _read(data)
        if not receipts and not sums:
            return
        self.segments += 1
        self.db.execute("begin")
        rows = [(sidecar, path.stem, *each) for each in receipts]
        self.db.executemany("insert into receipts values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self.db.executemany("insert into sums values (?, ?, ?, ?, ?, ?, ?, ?)", [(path.stem, *each) for each in sums])
        self.db.execute("commit")


def holds_calls(path: Path) -> bool:
    """Whether the store may lack a call that is in this segment. A call that ended without cost is not one: it is never
    counted, and the next start removes its segment."""
    lines = decode_lines(path.read_bytes())
    under_way: set[int] = set()
    for values in lines.values:
        match values[0]:
            case LineKind.HEAD | LineKind.READY:
                pass
            case LineKind.INTENT | LineKind.CARRIED:
                under_way.add(values[1])
            case LineKind.NOTHING:
                under_way.discard(values[1])
            case _:  # a receipt, or the end of a segment that was not flushed
                return True
    return bool(under_way or lines.corrupt_lines)


def _read(data: bytes) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    begun: dict[int, tuple[ChargedCounters, int]] = {}
    receipts: list[tuple[Any, ...]] = []
    sums: list[tuple[Any, ...]] = []
    for values in decode_lines(data).values:
        match values[0]:
            case LineKind.INTENT | LineKind.CARRIED:
                intent = Intent.from_values(values)
                begun[values[1]] = intent.charged, intent.started_ms
            case LineKind.RECORD:
                receipts.append(_receipt(*begun[values[1]], Receipt.from_values(values)))
            case LineKind.SEAL:
                seal = SegmentSeal.from_values(values, {})
                sums += [_sum(*each) for part in seal.parts for each in part]
    return receipts, sums


def _receipt(account: ChargedCounters, started_ms: int, receipt: Receipt) -> tuple[Any, ...]:
    """Under the narrowest scope that pays: the app's, which comes last where the org pays as well."""
    counters = [counter for counter in account.counters if not counter.is_lease]
    narrowest = max(counters, key=lambda counter: len(counter.scope))
    counts, about = receipt.counts, receipt.about
    tokens = ",".join(map(str, counts[2:7]))
    return (
        narrowest.scope,
        narrowest.label,
        narrowest.period_or_lease,
        started_ms / 1000,
        about.get("request", ""),
        about.get("why", ""),
        counts.pico,
        tokens,
        len(counters),
        len(counters) < len(account.counters),
    )


def _sum(counter: Counter, counts: UsageCounts) -> tuple[Any, ...]:
    return (
        counter.scope,
        counter.label,
        counter.period_or_lease,
        counter.shards,
        counts.requests,
        counts.estimated_requests,
        str(counts.pico),
    )
