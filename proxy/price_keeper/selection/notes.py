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

from price_keeper.errors import InvalidStoreRequest
from price_keeper.model import Scope
from price_keeper.recording.lines import line
from price_keeper.selection import sticky
from price_keeper.selection.settings import ORG_SETTINGS
from price_keeper.selection.watch import RefreshState
from price_keeper.stores.contract import Item, Value
from price_keeper.stores.sqlite_codec import decode_item, encode_item

MOST: Final = 10_000
MOST_BYTES: Final = 4 * 2**20
LONGEST: Final = 64 * 2**10  # bytes of one

_SETTINGS, _STANDING = "settings", "standing"
_OF_SETTINGS = frozenset({*ORG_SETTINGS, "version", "settled", "settled_until_epoch"} - {"org_name"})
_OF_STATE = frozenset({sticky.LABEL, "override_label", "override_until_epoch", "override_version"})
_SPOILT = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, InvalidStoreRequest)

Name = tuple[str, str]  # what it is about, and of which scope


class Stood(NamedTuple):
    """How a scope stood. `spent`, in pico-dollars by label: what was in the store, and what of the worker's own was
    not, yet. `is_ours`: it was this worker's."""

    state: Item
    spent: Mapping[str, tuple[int, int]]
    is_ours: bool


class Notes:
    def __init__(self, now: Callable[[], float], worker: int = 0) -> None:
        self._now = now
        self._worker = worker
        # By what they are about and by scope; the one made or confirmed last is the last.
        self._lines: dict[str, dict[str, bytes]] = {_SETTINGS: {}, _STANDING: {}}
        self._size = 0
        self._standing: dict[str, RefreshState] = {}  # to be noted, by scope
        self.is_new = False  # something that was noted

    # What is noted.

    def settings(self, scope: Scope, item: Item | None) -> None:
        """As they were read consistently; None: nobody put any."""
        kept = {name: value for name, value in (item or {}).items() if name in _OF_SETTINGS}
        if item is not None and not kept:  # written by hand with nothing but a name, and there all the same
            kept = {"version": 0}
        self._note(_SETTINGS, scope.key, kept)

    def stands(self, watch: RefreshState, *, is_soon: bool = False) -> None:
        """Otherwise than it did, perhaps. It is noted when somebody has it taken down, since it may do so often; soon,
        where it is not only more that was spent. What ends in a period that is over takes nobody's place."""
        if watch.budget.span.covers(self._now()):
            self._standing[watch.budget.scope.key] = watch
            self.is_new |= is_soon

    @property
    def standings(self) -> int:
        """To take down."""
        return len(self._standing)

    def take_down(self, most: int) -> None:
        """So many of them."""
        for scope in [*islice(self._standing, most)]:
            self._note_standing(self._standing.pop(scope))

    def _note_standing(self, watch: RefreshState) -> None:
        standing = watch.budget
        state = {name: value for name, value in (watch.sticky_item or {}).items() if name in _OF_STATE}
        spent: dict[str, Value] = {label: [*standing.get_tracker(label).stored_and_pending] for label in standing.settings.quotas}
        content: Item = {"period": standing.span.key, "state": state, "spent": spent, "worker": self._worker}
        self._note(_STANDING, standing.scope.key, content)

    def _note(self, about: str, scope: str, content: Item) -> None:
        before = self._lines[about].pop(scope, b"")
        self._size -= len(before)
        try:
            rest = orjson.dumps([about, scope, orjson.Fragment(encode_item(content))])[1:]
        except (AssertionError, *_SPOILT):  # it was written by hand; whoever reads it goes by the rest
            return
        is_same = before.endswith(rest + b"\n")
        self.is_new |= not is_same
        self._keep((about, scope), before if is_same else line(b"[%.3f,%b" % (self._now(), rest)))

    def _keep(self, name: Name, note: bytes) -> None:
        if len(note) > LONGEST:
            return
        about, scope = name
        self._lines[about][scope] = note
        self._size += len(note)
        while sum(map(len, self._lines.values())) > MOST or self._size > MOST_BYTES:
            lines = self._lines[_STANDING] or self._lines[_SETTINGS]
            self._size -= len(lines.pop(next(iter(lines))))

    # What was noted.

    def settings_of(self, scope: Scope) -> Item | None:
        """Empty where nobody had put any; None where nothing is known."""
        return self._noted(_SETTINGS, scope)

    def stood(self, scope: Scope, period: str) -> Stood | None:
        found: Any = self._noted(_STANDING, scope)
        try:
            if found is None or found["period"] != period:
                return None
            spent = {str(label): (int(stored), int(waiting)) for label, (stored, waiting) in found["spent"].items()}
            # Notes of older versions do not tell whose they are.
            return Stood(dict(found["state"]), spent, found.get("worker") == self._worker)
        except _SPOILT:
            return None

    def knows(self, scope: Scope) -> bool:
        """What is to be known of it and of its org."""
        return all(each.key in self._lines[_SETTINGS] for each in (scope, Scope(scope.org)))

    def _noted(self, about: str, scope: Scope) -> Item | None:
        found = self._lines[about].get(scope.key)
        if found is None:
            return None
        try:
            return decode_item(orjson.dumps(orjson.loads(found.partition(b" ")[2])[-1]))
        except _SPOILT:
            return None

    # From one process to the next.

    def lines(self) -> list[bytes]:
        """All of them, which are new no more."""
        self.is_new = False
        return [*self._lines[_SETTINGS].values(), *self._lines[_STANDING].values()]

    def remember(self, found: Mapping[Name, bytes]) -> None:
        """What `newest` found, but for what is known here."""
        for (about, scope), note in found.items():
            if scope not in self._lines[about]:
                self._keep((about, scope), note)


def newest(noted: Iterable[list[Any]]) -> tuple[dict[Name, bytes], int]:
    """Of all that was noted, and how many of these are no notes."""
    good: list[tuple[float, Name, bytes]] = []
    spoilt = 0
    for values in noted:
        try:
            good.append(_read(values))
        except _SPOILT:
            spoilt += 1
    return {name: note for _, name, note in sorted(good)}, spoilt


def _read(values: list[Any]) -> tuple[float, Name, bytes]:
    """When it was made, of what, and the note. A line that is whole may still be none."""
    made, about, scope, _ = values
    if about not in (_SETTINGS, _STANDING) or type(made) not in (int, float):
        raise ValueError("no note")
    return made, (about, Scope.from_key(scope).key), line(orjson.dumps(values))
