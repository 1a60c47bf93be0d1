"""What selection means for requests, and what answers say of it. Pure."""

from __future__ import annotations

from typing import Final

from price_keeper.exchange import Header
from price_keeper.forwarding.model_path import Operation
from price_keeper.selection.policy import Mode
from price_keeper.selection.standing import Decision

# Bodies of these are in the format of the model that they are written for.
SPECIFIC: Final = frozenset({Operation.INVOKE, Operation.INVOKE_STREAM, Operation.CHAT_COMPLETIONS})

_MODES: Final = {mode: (b"x-price-keeper-mode", mode.value.encode()) for mode in Mode}
EXCEEDED: Final = _MODES[Mode.EXCEEDED]


_QUOTA: Final = b"x-price-keeper-quota-pct"
_told: dict[tuple[Mode, int | None], tuple[Header, ...]] = {}  # a hundred of each mode, as nearly all calls are told
_MOST_TOLD: Final = 1000


def decision_told(decision: Decision) -> tuple[Header, ...]:
    _, mode, percent, instead = decision
    found = _told.get((mode, percent)) or _made(mode, percent)
    if instead is not None:
        return (*found, (b"x-price-keeper-shadow-label", instead.encode() or b"none"))
    return found


def _made(mode: Mode, percent: int | None) -> tuple[Header, ...]:
    made: tuple[Header, ...] = (_MODES[mode],) if percent is None else (_MODES[mode], (_QUOTA, b"%d" % percent))
    if len(_told) < _MOST_TOLD:
        _told[mode, percent] = made
    return made
