"""How a target reports that two readings differ: with both of them, as pytest does not rewrite its asserts."""

from __future__ import annotations

_LONGEST = 1500


class Differs(AssertionError):
    """Something stood in the input that one reader took for another thing than the other."""


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise Differs(f"{what}: {_shown(found)} is not {_shown(expected)}")


def holds(fact: object, what: str) -> None:
    if not fact:
        raise Differs(what)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
