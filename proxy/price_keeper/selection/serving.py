"""What selection means for requests, and what answers say of it. Pure."""

from __future__ import annotations

from typing import Final

from price_keeper.exchange import Header
from price_keeper.operations import Operation
from price_keeper.selection.policy import Mode
from price_keeper.selection.standing import Decision

# Bodies of these are in the format of the model that they are written for.
FORMAT_SPECIFIC_OPERATIONS: Final = frozenset({Operation.INVOKE, Operation.INVOKE_STREAM, Operation.CHAT_COMPLETIONS})

_MODE_HEADERS: Final = {mode: (b"x-price-keeper-mode", mode.value.encode()) for mode in Mode}
EXCEEDED_HEADER: Final = _MODE_HEADERS[Mode.EXCEEDED]


_QUOTA_HEADER: Final = b"x-price-keeper-quota-pct"
_decision_headers: dict[
    tuple[Mode, int | None], tuple[Header, ...]
] = {}  # a hundred of each mode, as nearly all calls are told
_MAX_DECISION_HEADERS: Final = 1000


def build_decision_headers(decision: Decision) -> tuple[Header, ...]:
    _, mode, percent, shadow_label = decision
    headers = _decision_headers.get((mode, percent)) or _build_mode_headers(mode, percent)
    if shadow_label is not None:
        return (*headers, (b"x-price-keeper-shadow-label", shadow_label.encode() or b"none"))
    return headers


def _build_mode_headers(mode: Mode, percent: int | None) -> tuple[Header, ...]:
    headers: tuple[Header, ...] = (
        (_MODE_HEADERS[mode],) if percent is None else (_MODE_HEADERS[mode], (_QUOTA_HEADER, b"%d" % percent))
    )
    if len(_decision_headers) < _MAX_DECISION_HEADERS:
        _decision_headers[mode, percent] = headers
    return headers
