"""Remembers a SIGHUP that arrives before the event loop runs, so that the process reloads once it has started.

Imports only `signal`, because the command line loads it before everything else.
"""

from __future__ import annotations

import signal

_is_reload_requested = False


def record_reload_signals() -> None:
    """Remember SIGHUP from now on. By default it would end the process."""
    signal.signal(signal.SIGHUP, _on_sighup)


def _on_sighup(*_: object) -> None:
    global _is_reload_requested
    _is_reload_requested = True


def ignore_reload_signals() -> None:
    """Ignore SIGHUP at the end of the process, when the event loop that handled it has stopped."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def take_reload_request() -> bool:
    """Whether SIGHUP arrived since the last call; clears the request."""
    global _is_reload_requested
    was_requested, _is_reload_requested = _is_reload_requested, False
    return was_requested
