"""`price-keeper doctor`: run all checks of a role on this machine and print how to fix what they find."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from price_keeper.cli.dev_command import build_dev_config
from price_keeper.cli.output import CommandError, print_json, print_lines
from price_keeper.cli.store_selection import describe_labels, select_config
from price_keeper.cli.terminal import DIM, GREEN, RED, YELLOW, get_terminal_width, is_terminal, paint
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.doctor.check_list import build_checks
from price_keeper.doctor.doctor_checks import CheckResult, FindingStatus, ok, run_doctor_checks
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.reports.terminal_text import make_printable
from price_keeper.tasks import DaemonThreadPool

MIN_WRAP_WIDTH = 20  # on a narrower terminal lines are not wrapped
_STATUS_WORDS = {FindingStatus.SKIPPED: "-"}  # a skipped check needs no attention
_STATUS_COLORS = {
    FindingStatus.OK: GREEN,
    FindingStatus.WARNING: YELLOW,
    FindingStatus.TROUBLE: RED,
    FindingStatus.SKIPPED: DIM,
}
_STATUS_ORDER = (
    FindingStatus.TROUBLE,
    FindingStatus.WARNING,
    FindingStatus.SKIPPED,
    FindingStatus.OK,
)  # the most severe first


def run_doctor(args: Namespace) -> int:
    config, source, description = _select_doctor_config(args)
    if args.data_dir is not None and args.role != "both":
        raise CommandError("--role is for price-keeper serve; --data-dir selects price-keeper dev, with every role")
    results = asyncio.run(_run_checks(DoctorContext(config, os.environ, SystemClock(), source, args.role)))
    all_results = [CheckResult("configuration", ok(description)), *results]
    if args.json:
        print_json(_build_record(all_results))
    else:
        print_lines(_format_results(all_results))
    return 1 if any(each.finding.status is FindingStatus.TROUBLE for each in all_results) else 0


def _select_doctor_config(args: Namespace) -> tuple[Config, str, str]:
    """The configuration, the option that selects it for another command, and a description for people."""
    if args.data_dir is None:
        config = select_config(args)
        source = "" if args.config is None else f" --config {args.config}"
        return config, source, f"{args.config or 'config.yaml'}: good, with {describe_labels(config)}"
    folder: Path = args.data_dir
    if not folder.is_dir():
        raise CommandError(f"there is no folder {folder} yet; this makes it: price-keeper dev --data-dir {folder}")
    return build_dev_config(folder, args.port, args.control_port, None), "", f"of dev, in {folder}"


async def _run_checks(context: DoctorContext) -> list[CheckResult]:
    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())
    if context.needs_aws:
        import aioboto3  # noqa: F401 - takes half a second, which must not count against the deadline of a check
    try:
        return await run_doctor_checks(build_checks(context), context)
    finally:
        await context.close()


def _format_results(results: Sequence[CheckResult]) -> list[str]:
    longest = max(len(each.name) for each in results)
    lines: list[str] = []
    for name, finding in results:
        status = paint(
            f"{_STATUS_WORDS.get(finding.status, finding.status.value):7}", _STATUS_COLORS.get(finding.status, "")
        )
        first, *other_lines = _wrap_to_terminal(finding.message, longest + 11)
        lines.append(status + f"  {name:{longest}}  {first}")
        if finding.remedy:
            other_lines += _wrap_to_terminal(f"to fix it: {finding.remedy}", longest + 11)
        lines += [f"{'':{longest + 11}}{line}" for line in other_lines]
    return [*lines, "", _format_summary(results)]


def _wrap_to_terminal(text: str, indent: int) -> list[str]:
    """On a terminal, wrap the text to the width that is left beside the other columns."""
    available_width = get_terminal_width() - indent
    if not is_terminal(sys.stdout) or available_width < MIN_WRAP_WIDTH:
        return [text]
    return wrap(make_printable(text), available_width, break_long_words=False, break_on_hyphens=False) or [""]


def _format_summary(results: Sequence[CheckResult]) -> str:
    counts = Counter(each.finding.status for each in results)
    return ", ".join(f"{status.value}: {counts[status]}" for status in _STATUS_ORDER if counts[status])


def _build_record(results: Sequence[CheckResult]) -> dict[str, object]:
    statuses = {each.finding.status for each in results} - {FindingStatus.SKIPPED}
    worst = next(status for status in _STATUS_ORDER if status in statuses)
    checks = [
        {"name": name, "status": finding.status.value, "found": finding.message, "mend": finding.remedy or None}
        for name, finding in results
    ]
    return {"status": worst.value, "checks": checks}
