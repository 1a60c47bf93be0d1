"""What a worker tells its supervisor, once, through a pipe: that it has started, or why it could not."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, TypeAlias

from price_keeper.errors import ConfigError, PriceKeeperError

Report: TypeAlias = "dict[str, Any]"

_MOST = 64 * 1024  # bytes: what a pipe takes at once, so that nobody waits for it to be read


def of_start(told: dict[str, str]) -> Report:
    return {"started": told}


def of_failure(failure: PriceKeeperError | OSError) -> Report:
    problems = failure.problems if isinstance(failure, ConfigError) else ()
    return {"failed": str(failure), "problems": list(problems)}


class Line:
    """The worker's end of the pipe, closed after the first report: its number may be another file's from then on."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe

    def send(self, report: Report) -> bool:
        """Whether it was the first; a supervisor that is gone needs to know nothing."""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            return False
        data = json.dumps(report).encode()
        if len(data) > _MOST:
            data = json.dumps({"failed": "it says too much of why", "problems": []}).encode()
        with suppress(BrokenPipeError):
            os.write(pipe, data)
        os.close(pipe)
        return True


def read(data: bytes) -> Report | None:
    """None while there is not all of it."""
    try:
        return dict(json.loads(data))
    except ValueError:
        return None


def failure_in(report: Report) -> PriceKeeperError | None:
    """The same as if it had happened here."""
    if "failed" not in report:
        return None
    return ConfigError(report["problems"]) if report["problems"] else PriceKeeperError(report["failed"])
