"""The faults that tests of the store's way name, each in one word: of `wire_faults`, done by `wire_proxy`."""

from __future__ import annotations

from tests.support.wire_faults import DYNAMODB, Answer, Break, Fault, FaultKind, FaultPoint, Pass, dynamodb_error
from tests.support.wire_proxy import WireProxy as FaultProxy
from tests.support.wire_proxy import wire_proxy as fault_proxy

__all__ = [
    "DYNAMODB",
    "Answer",
    "BlackHole",
    "CutAnswer",
    "DropAnswer",
    "Fault",
    "FaultProxy",
    "Pass",
    "Reset",
    "dynamodb_error",
    "fault_proxy",
]


def DropAnswer() -> Break:  # noqa: N802 - reads as the others do
    """The request is carried out; the connection is closed without an answer."""
    return Break(FaultPoint.ANSWER)


def Reset() -> Break:  # noqa: N802
    """The request is carried out; the connection is reset, as by a machine that went away."""
    return Break(FaultPoint.ANSWER, FaultKind.RESET)


def CutAnswer() -> Break:  # noqa: N802
    """The request is carried out; the connection is closed half-way through the answer."""
    return Break(FaultPoint.MIDDLE)


def BlackHole() -> Break:  # noqa: N802
    """The request is taken and never answered, nor carried out."""
    return Break(FaultPoint.REQUEST, FaultKind.STALL)
