"""Defines checks and findings, and runs all checks concurrently, each within a deadline.

A check that fails or times out becomes a finding of its own and hides none of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from price_keeper.doctor.doctor_context import DoctorContext

CHECK_DEADLINE_SECONDS = 5.0  # of each check; all checks run concurrently


class FindingStatus(Enum):
    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    TROUBLE = "trouble"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` says how to fix the problem: with which command, variable, permission or configuration key."""

    status: FindingStatus
    message: str
    remedy: str = ""


def ok(message: str) -> Finding:
    return Finding(FindingStatus.OK, message)


def skipped(reason: str) -> Finding:
    return Finding(FindingStatus.SKIPPED, f"skipped: {reason}")


def warning(message: str, remedy: str) -> Finding:
    return Finding(FindingStatus.WARNING, message, remedy)


def trouble(message: str, remedy: str) -> Finding:
    return Finding(FindingStatus.TROUBLE, message, remedy)


class DoctorCheck(NamedTuple):
    name: str
    run: Callable[[DoctorContext], Awaitable[Finding]]
    timeout_remedy: str = "try again; if it stays so, check the disk and the network of this machine"


class CheckResult(NamedTuple):
    name: str
    finding: Finding


def in_thread(check: Callable[[DoctorContext], Finding]) -> Callable[[DoctorContext], Awaitable[Finding]]:
    """Runs a check that may block, for example on a disk or a credential provider, in a thread."""

    async def run_check(context: DoctorContext) -> Finding:
        return await asyncio.to_thread(check, context)

    return run_check


async def run_doctor_checks(checks: Sequence[DoctorCheck], context: DoctorContext) -> list[CheckResult]:
    """Run all checks concurrently, and return their results in the order of the checks."""
    return list(await asyncio.gather(*(_run_check(check, context) for check in checks)))


async def _run_check(check: DoctorCheck, context: DoctorContext) -> CheckResult:
    try:
        async with asyncio.timeout(CHECK_DEADLINE_SECONDS):
            return CheckResult(check.name, await check.run(context))
    except TimeoutError:
        return CheckResult(
            check.name, trouble(f"no answer in {CHECK_DEADLINE_SECONDS:g} seconds", check.timeout_remedy)
        )
    except Exception as failure:  # must not hide other checks; its message may hold a secret
        return CheckResult(
            check.name, trouble(f"could not be looked at: {type(failure).__name__}", check.timeout_remedy)
        )
