"""What a worker tells its supervisor, once, through a pipe: that it has started, or why it could not."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, TypeAlias

from price_keeper.errors import ConfigError, PriceKeeperError

WorkerReport: TypeAlias = "dict[str, Any]"

_MAX_REPORT_BYTES = 64 * 1024  # bytes: what a pipe takes at once, so that nobody waits for it to be read


def build_start_report(details: dict[str, str]) -> WorkerReport:
    return {"started": details}


def build_failure_report(failure: PriceKeeperError | OSError) -> WorkerReport:
    problems = failure.problems if isinstance(failure, ConfigError) else ()
    return {"failed": str(failure), "problems": list(problems)}


class ReportPipe:
    """The worker's end of the pipe, closed after the first report: its number may be another file's from then on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def send(self, report: WorkerReport) -> bool:
        """Whether it was the first; a supervisor that is gone needs to know nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return False
        data = json.dumps(report).encode()
        if len(data) > _MAX_REPORT_BYTES:
            data = json.dumps({"failed": "it says too much of why", "problems": []}).encode()
        with suppress(BrokenPipeError):
            os.write(descriptor, data)
        os.close(descriptor)
        return True


def parse_report(data: bytes) -> WorkerReport | None:
    """None while there is not all of it."""
    try:
        return dict(json.loads(data))
    except ValueError:
        return None


def parse_failure(report: WorkerReport) -> PriceKeeperError | None:
    """The same as if it had happened here."""
    if "failed" not in report:
        return None
    return ConfigError(report["problems"]) if report["problems"] else PriceKeeperError(report["failed"])
