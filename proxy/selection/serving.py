"""What selection means for requests, and what answers say of it. Pure."""

from __future__ import annotations

from proxy.exchange import Header
from proxy.forwarding.model_path import Operation
from proxy.selection.policy import Mode
from proxy.selection.standing import Decision

# Bodies of these are in the format of the model that they are written for.
SPECIFIC = frozenset({Operation.INVOKE, Operation.INVOKE_STREAM, Operation.CHAT_COMPLETIONS})

_MODES = {mode: (b"x-price-keeper-mode", mode.value.encode()) for mode in Mode}
EXCEEDED = _MODES[Mode.EXCEEDED]


def decision_told(decision: Decision) -> list[Header]:
    headers = [_MODES[decision.mode]]
    if decision.percent is not None:
        headers.append((b"x-price-keeper-quota-pct", b"%d" % decision.percent))
    if decision.instead is not None:
        headers.append((b"x-price-keeper-shadow-label", decision.instead.encode() or b"none"))
    return headers
