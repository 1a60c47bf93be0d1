"""What the store last said of orgs and apps, and how their budgets stood: noted for when it cannot be asked, also by a
process that begins then (`notebook`). Pure.

    of an org or an app   the settings that decisions are made of, or that there are none
    of a scope            in one period: the active label, the override, and of each label what was spent

A note is a line as a journal has them. Nothing else is noted: neither the credentials that stand on the same items, nor
who asked for an override and why. The ones made longest ago make room for others, and no settings as long as there are
sums, which say nothing without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from price_keeper.budgets.budget_state import RefreshState
from price_keeper.domain import Scope
from price_keeper.errors import InvalidStoreRequest
from price_keeper.recording.lines import encode_line
from price_keeper.selection import sticky
from price_keeper.selection.settings import ORG_SETTINGS
from price_keeper.stores.contract import Item, Value
from price_keeper.stores.item_codec import decode_item, encode_item

MAX_RECORDS: Final = 10_000
MAX_SNAPSHOT_BYTES: Final = 4 * 2**20
MAX_RECORD_BYTES: Final = 64 * 2**10  # bytes of one

_SETTINGS_KIND, _BUDGET_KIND = "settings", "standing"
_SETTINGS_FIELDS = frozenset({*ORG_SETTINGS, "version", "settled", "settled_until_epoch"} - {"org_name"})
_STICKY_FIELDS = frozenset({sticky.LABEL_ATTRIBUTE, "override_label", "override_until_epoch", "override_version"})
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidStoreRequest)

RecordKey = tuple[str, str]  # what it is about, and of which scope


class BudgetSnapshotRecord(NamedTuple):
    """How a scope stood. `spent`, in pico-dollars by label: what was in the store, and what of the worker's own was
    not, yet. `is_ours`: it was this worker's."""

    sticky_item: Item
    spent: Mapping[str, tuple[int, int]]
    is_own: bool


class BudgetSnapshot:
    def __init__(self, now: Callable[[], float], worker: int = 0) -> None:
        self._now = now
        self._worker = worker
        # By what they are about and by scope; the one made or confirmed last is the last.
        self._lines: dict[str, dict[str, bytes]] = {_SETTINGS_KIND: {}, _BUDGET_KIND: {}}
        self._size = 0
        self._pending: dict[str, RefreshState] = {}  # to be noted, by scope
        self.has_changes = False  # something that was noted

    # What is noted.

    def record_settings(self, scope: Scope, item: Item | None) -> None:
        """As they were read consistently; None: nobody put any."""
        fields = {name: value for name, value in (item or {}).items() if name in _SETTINGS_FIELDS}
        if item is not None and not fields:  # written by hand with nothing but a name, and there all the same
            fields = {"version": 0}
        self._record(_SETTINGS_KIND, scope.key, fields)

    def mark_changed(self, refresh: RefreshState, *, is_urgent: bool = False) -> None:
        """Otherwise than it did, perhaps. It is noted when somebody has it taken down, since it may do so often; soon,
        where it is not only more that was spent. What ends in a period that is over takes nobody's place."""
        if refresh.budget.span.covers(self._now()):
            self._pending[refresh.budget.scope.key] = refresh
            self.has_changes |= is_urgent

    @property
    def pending_count(self) -> int:
        """To take down."""
        return len(self._pending)

    def record_pending(self, limit: int) -> None:
        """So many of them."""
        for scope in [*islice(self._pending, limit)]:
            self._record_budget(self._pending.pop(scope))

    def _record_budget(self, refresh: RefreshState) -> None:
        budget = refresh.budget
        sticky_fields = {name: value for name, value in (refresh.sticky_item or {}).items() if name in _STICKY_FIELDS}
        spent: dict[str, Value] = {
            label: [*budget.get_tracker(label).stored_and_pending] for label in budget.settings.quotas
        }
        content: Item = {"period": budget.span.key, "state": sticky_fields, "spent": spent, "worker": self._worker}
        self._record(_BUDGET_KIND, budget.scope.key, content)

    def _record(self, kind: str, scope: str, content: Item) -> None:
        last_line = self._lines[kind].pop(scope, b"")
        self._size -= len(last_line)
        try:
            rest = orjson.dumps([kind, scope, orjson.Fragment(encode_item(content))])[1:]
        except (AssertionError, *_MALFORMED):  # it was written by hand; whoever reads it goes by the rest
            return
        is_same = last_line.endswith(rest + b"\n")
        self.has_changes |= not is_same
        self._store_line((kind, scope), last_line if is_same else encode_line(b"[%.3f,%b" % (self._now(), rest)))

    def _store_line(self, key: RecordKey, record_line: bytes) -> None:
        if len(record_line) > MAX_RECORD_BYTES:
            return
        kind, scope = key
        self._lines[kind][scope] = record_line
        self._size += len(record_line)
        while sum(map(len, self._lines.values())) > MAX_RECORDS or self._size > MAX_SNAPSHOT_BYTES:
            lines = self._lines[_BUDGET_KIND] or self._lines[_SETTINGS_KIND]
            self._size -= len(lines.pop(next(iter(lines))))

    # What was noted.

    def find_settings(self, scope: Scope) -> Item | None:
        """Empty where nobody had put any; None where nothing is known."""
        return self._decode_record(_SETTINGS_KIND, scope)

    def find_budget(self, scope: Scope, period: str) -> BudgetSnapshotRecord | None:
        found: Any = self._decode_record(_BUDGET_KIND, scope)
        try:
            if found is None or found["period"] != period:
                return None
            spent = {str(label): (int(stored), int(waiting)) for label, (stored, waiting) in found["spent"].items()}
            # Notes of older versions do not tell whose they are.
            return BudgetSnapshotRecord(dict(found["state"]), spent, found.get("worker") == self._worker)
        except _MALFORMED:
            return None

    def has_settings(self, scope: Scope) -> bool:
        """What is to be known of it and of its org."""
        return all(each.key in self._lines[_SETTINGS_KIND] for each in (scope, Scope(scope.org)))

    def _decode_record(self, kind: str, scope: Scope) -> Item | None:
        found = self._lines[kind].get(scope.key)
        if found is None:
            return None
        try:
            return decode_item(orjson.dumps(orjson.loads(found.partition(b" ")[2])[-1]))
        except _MALFORMED:
            return None

    # From one process to the next.

    def export_lines(self) -> list[bytes]:
        """All of them, which are new no more."""
        self.has_changes = False
        return [*self._lines[_SETTINGS_KIND].values(), *self._lines[_BUDGET_KIND].values()]

    def merge(self, newest: Mapping[RecordKey, bytes]) -> None:
        """What `newest` found, but for what is known here."""
        for (kind, scope), record_line in newest.items():
            if scope not in self._lines[kind]:
                self._store_line((kind, scope), record_line)


def select_newest(records: Iterable[list[Any]]) -> tuple[dict[RecordKey, bytes], int]:
    """Of all that was noted, and how many of these are no notes."""
    parsed: list[tuple[float, RecordKey, bytes]] = []
    malformed = 0
    for values in records:
        try:
            parsed.append(_parse_record(values))
        except _MALFORMED:
            malformed += 1
    return {name: note for _, name, note in sorted(parsed)}, malformed


def _parse_record(values: list[Any]) -> tuple[float, RecordKey, bytes]:
    """When it was made, of what, and the note. A line that is whole may still be none."""
    recorded_at, kind, scope, _ = values
    if kind not in (_SETTINGS_KIND, _BUDGET_KIND) or type(recorded_at) not in (int, float):
        raise ValueError("no note")
    return recorded_at, (kind, Scope.from_key(scope).key), encode_line(orjson.dumps(values))
