"""What one check comes to, and how checks are carried out: side by side, each within a few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from price_keeper.doctor.patient import DoctorContext

CHECK_SECONDS = 5.0  # of one check; all of them are under way at once


class Status(Enum):
    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    TROUBLE = "trouble"


@dataclass(frozen=True, slots=True)
class Finding:
    """`mend` says how to mend it: the command, variable, permission or key that does."""

    status: Status
    found: str
    mend: str = ""


def ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def skipped(why: str) -> Finding:
    return Finding(Status.SKIPPED, f"skipped: {why}")


def warning(found: str, mend: str) -> Finding:
    return Finding(Status.WARNING, found, mend)


def trouble(found: str, mend: str) -> Finding:
    return Finding(Status.TROUBLE, found, mend)


class Check(NamedTuple):
    name: str
    look: Callable[[DoctorContext], Awaitable[Finding]]
    if_late: str = "try again; if it stays so, look at the disk and the network of this machine"


class Told(NamedTuple):
    name: str
    finding: Finding


def aside(look: Callable[[DoctorContext], Finding]) -> Callable[[DoctorContext], Awaitable[Finding]]:
    """For what may block, as a disk or a provider of credentials does: in a thread, so that nothing else waits."""

    async def looked(context: DoctorContext) -> Finding:
        return await asyncio.to_thread(look, context)

    return looked


async def carried_out(checks: Sequence[Check], context: DoctorContext) -> list[Told]:
    """In the order of the checks."""
    return list(await asyncio.gather(*(_told(check, context) for check in checks)))


async def _told(check: Check, context: DoctorContext) -> Told:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            return Told(check.name, await check.look(context))
    except TimeoutError:
        return Told(check.name, trouble(f"no answer in {CHECK_SECONDS:g} seconds", check.if_late))
    except Exception as failure:  # one check that fails hides none of the others; its message might show a secret
        return Told(check.name, trouble(f"could not be looked at: {type(failure).__name__}", check.if_late))
