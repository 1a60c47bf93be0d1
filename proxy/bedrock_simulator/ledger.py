"""Records every request with its outcome and usage, for comparison with the product's records. Bounded."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from bedrock_simulator.request_metadata import HEADER as METADATA
from bedrock_simulator.usage import Usage

MAX_ENTRIES = 50_000
MAX_ENTRY_BODY_BYTES = 256 * 1024  # of one request; a longer body is truncated
MAX_TOTAL_BODY_BYTES = 128 * 1024 * 1024  # of all bodies together
MAX_MODELS = 1000  # with separate totals; the usage of further ones is summed up under ""


@dataclass(slots=True)
class Entry:
    """`usage` is what the call used, None if no model ran; `is_whole` says whether the caller got the response."""

    sequence: int  # 1 for the first request after the start
    arrived: float  # epoch seconds
    method: str
    target: str  # path and query of the request line, unchanged
    operation: str  # "" for a path without an operation
    model: str
    invocation_id: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    body_size: int
    request_id: str
    fault: str = ""
    status: int | None = None  # None while it is under way, or if it ended before a head
    usage: Usage | None = None
    is_whole: bool = False  # the response was sent completely and undamaged
    is_done: bool = False

    def header(self, name: str) -> str | None:
        raw = self._find_header(name)
        return None if raw is None else raw.decode("latin-1")

    def _find_header(self, name: str) -> bytes | None:
        wanted = name.lower().encode()
        return next((value for key, value in self.headers if key.lower() == wanted), None)

    @property
    def metadata(self) -> dict[str, str]:
        """The request metadata, from its header or from a Converse body; empty if there is none."""
        try:
            raw = self._find_header(METADATA)
            found = orjson.loads(self.body).get("requestMetadata") if raw is None else orjson.loads(raw)
        except (orjson.JSONDecodeError, AttributeError):
            return {}
        return found if isinstance(found, dict) else {}


class Ledger:
    """Bounded: the oldest entries are dropped, and counted. The cost of an operation does not grow with the entries."""

    def __init__(self, file: Path | None = None) -> None:
        """Two lines are appended to `file` for each request: one on arrival and one at its end."""
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._sequence = 0
        self.totals: dict[str, Usage] = {}  # by model, since the last `clear`, including dropped entries
        self.arrived = 0  # since the last `clear`
        self.dropped = 0
        self._file = None if file is None else os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.body)
        self.arrived += 1
        while len(self._entries) > MAX_ENTRIES or self._bytes > MAX_TOTAL_BODY_BYTES:
            self._bytes -= len(self._entries.popleft().body)
            self.dropped += 1
        if self._file is not None:
            os.write(self._file, orjson.dumps({"event": "arrived", **as_json(entry)}) + b"\n")

    def finish(self, entry: Entry) -> None:
        entry.is_done = True
        if entry.usage is not None:
            model = entry.model if entry.model in self.totals or len(self.totals) < MAX_MODELS else ""
            self.totals[model] = self.totals.get(model, Usage()) + entry.usage
        if self._file is not None:
            outcome = as_json(entry)
            outcome_fields = ("sequence", "status", "usage", "fault", "is_whole", "is_done")
            os.write(
                self._file, orjson.dumps({"event": "done", **{name: outcome[name] for name in outcome_fields}}) + b"\n"
            )

    def clear(self) -> None:
        """Delete all entries. Sequence numbers continue, so that a running request is not taken for a new one."""
        self._entries.clear()
        self.totals.clear()
        self._bytes = self.arrived = self.dropped = 0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def report(self, after: int = 0) -> dict[str, Any]:
        entries = [as_json(entry) for entry in self if entry.sequence > after]
        totals = {model: asdict(usage) for model, usage in self.totals.items()}
        return {"arrived": self.arrived, "dropped": self.dropped, "totals": totals, "entries": entries}


def as_json(entry: Entry) -> dict[str, Any]:
    """Bytes are decoded as Latin-1, which loses none and keeps the JSON readable."""
    return {
        **{name: getattr(entry, name) for name in Entry.__slots__},
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in entry.headers],
        "body": entry.body.decode("latin-1"),
        "usage": None if entry.usage is None else asdict(entry.usage),
        "metadata": entry.metadata,
    }
