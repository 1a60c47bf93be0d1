"""SIGHUP before the event loop runs: remembered, so that the configuration is read again once the process has started.

Imports nothing but `signal`: the command line loads it first.
"""

from __future__ import annotations

import signal

_is_reload_requested = False


def record_reload_signals() -> None:
    """From now on none ends the process, as it would by default."""
    signal.signal(signal.SIGHUP, _on_sighup)


def _on_sighup(*_: object) -> None:
    global _is_reload_requested
    _is_reload_requested = True


def ignore_reload_signals() -> None:
    """At the very end, when there is no loop any more to heed them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def take_reload_request() -> bool:
    """Whether one came since the last time that this was asked."""
    global _is_reload_requested
    was_requested, _is_reload_requested = _is_reload_requested, False
    return was_requested
