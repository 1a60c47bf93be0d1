"""Advice after an error, by its class and by the command. It is added to messages that only say what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from price_keeper.errors import (
    JournalInUse,
    JournalOwnerUnknown,
    JournalUnusable,
    ListenFailed,
    PriceKeeperError,
    StoreAccessDenied,
    StoreMisconfigured,
    StoreThrottled,
    StoreUnavailable,
)

_HintsByError: TypeAlias = "Mapping[type[PriceKeeperError], str]"

_DOCTOR_HINT = "price-keeper doctor looks at what is amiss"
_SERVE_HINTS: _HintsByError = {
    ListenFailed: "name another address in listen.data, listen.control or listen.health of the configuration",
    JournalInUse: "stop that process, or name another folder in journal.dir of the configuration",
}
_DEV_HINTS: _HintsByError = {
    ListenFailed: "name other ports with --port and --control-port, where 0 is any free one",
    JournalInUse: "stop that process, or name another folder with --data-dir DIR",
}
_REPLAY_HINTS: _HintsByError = {
    JournalInUse: "stop that process first; a sidecar that runs brings its journal to the store by itself",
    JournalOwnerUnknown: "if that process has ended, and this is its final journal, confirm it with --owner-is-dead",
}
_COMMON_HINTS: _HintsByError = {
    StoreAccessDenied: f"see which credentials are used here; {_DOCTOR_HINT}",
    StoreUnavailable: f"see whether the store runs and is reached from here; {_DOCTOR_HINT}",
    StoreMisconfigured: f"store in the configuration says which one it is; {_DOCTOR_HINT}",
    StoreThrottled: "try again in a while",
    JournalUnusable: f"see that this user may write there; {_DOCTOR_HINT}",
}


def add_hint(failure: PriceKeeperError, words: Sequence[str]) -> str:
    """The message of an error, with advice if the message has none."""
    command_hints = {"serve": _SERVE_HINTS, "dev": _DEV_HINTS, "replay": _REPLAY_HINTS}.get(
        words[0] if words else "", _SERVE_HINTS
    )
    hint = next(
        (text for kind, text in [*command_hints.items(), *_COMMON_HINTS.items()] if isinstance(failure, kind)), None
    )
    message = str(failure)
    return message if hint is None or "price-keeper" in message else f"{message}; {hint}"
