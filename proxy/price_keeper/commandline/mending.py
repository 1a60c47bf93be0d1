"""What to do next after a failure of which the message, made further down, can only say what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from price_keeper.errors import (
    JournalInUse,
    JournalUnusable,
    ListenFailed,
    StoreAccessDenied,
    JournalOwnerUnknown,
    PriceKeeperError,
    StoreMisconfigured,
    StoreUnavailable,
    StoreThrottled,
)

_Steps: TypeAlias = "Mapping[type[PriceKeeperError], str]"

_DOCTOR = "price-keeper doctor looks at what is amiss"
_OF_SERVE: _Steps = {
    ListenFailed: "name another address in listen.data, listen.control or listen.health of the configuration",
    JournalInUse: "stop that process, or name another folder in journal.dir of the configuration",
}
_OF_DEV: _Steps = {
    ListenFailed: "name other ports with --port and --control-port, where 0 is any free one",
    JournalInUse: "stop that process, or name another folder with --data-dir DIR",
}
_OF_REPLAY: _Steps = {
    JournalInUse: "stop that process first; a sidecar that runs brings its journal to the store by itself",
    JournalOwnerUnknown: "if it has ended, and this is what it left, say so with --owner-is-dead",
}
_OF_ALL: _Steps = {
    StoreAccessDenied: f"see which credentials are used here; {_DOCTOR}",
    StoreUnavailable: f"see whether the store runs and is reached from here; {_DOCTOR}",
    StoreMisconfigured: f"store in the configuration says which one it is; {_DOCTOR}",
    StoreThrottled: "try again in a while",
    JournalUnusable: f"see that this user may write there; {_DOCTOR}",
}


def with_next_step(failure: PriceKeeperError, words: Sequence[str]) -> str:
    """The message, and what mends it if the message does not say so."""
    own = {"serve": _OF_SERVE, "dev": _OF_DEV, "replay": _OF_REPLAY}.get(words[0] if words else "", _OF_SERVE)
    step = next((text for kind, text in [*own.items(), *_OF_ALL.items()] if isinstance(failure, kind)), None)
    message = str(failure)
    return message if step is None or "price-keeper" in message else f"{message}; {step}"
