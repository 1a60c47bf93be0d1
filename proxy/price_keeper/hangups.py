"""SIGHUPs that come while a process starts: it is to read its configuration once more when it can."""

from __future__ import annotations

import signal

_came = False


def noted() -> None:
    """From now on none ends the process, as it would by default."""
    signal.signal(signal.SIGHUP, _note)


def _note(*_: object) -> None:
    global _came
    _came = True


def ignored() -> None:
    """At the very end, when there is no loop any more to heed them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def taken() -> bool:
    """Whether one came since the last time that this was asked."""
    global _came
    came, _came = _came, False
    return came
