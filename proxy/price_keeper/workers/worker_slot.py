"""A worker's index among all workers, and the configuration that follows from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from price_keeper.config import Config
from price_keeper.ledger.orphaned_journals import locate_worker_folder

MAX_WORKERS = 64  # more workers than a large machine has cores would only cost memory


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """`socket_folder` has the Unix sockets on which the workers serve readiness and metrics to the first one.
    `lifeline` is a pipe that ends when the supervisor does, however it ended."""

    number: int = 0
    count: int = 1
    socket_folder: Path = Path()
    lifeline: int | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def shares_port(self) -> bool:
        return self.count > 1

    @property
    def other_numbers(self) -> range:
        """The workers that this one reports for: all others if it is the first, and none if it is not."""
        return range(1, self.count if self.is_first else 1)

    def socket_path(self, number: int) -> Path:
        return self.socket_folder / f"worker-{number}"

    def localize_config(self, config: Config) -> Config:
        """The configuration of this worker: a journal folder of its own, and its share of limits that apply to all
        workers together."""
        if not self.shares_port:
            return config
        journal = config.journal
        return replace(
            config,
            journal=replace(
                journal,
                dir=str(locate_worker_folder(Path(journal.dir), self.number)),
                max_unflushed_usd=journal.max_unflushed_usd / self.count,
            ),
        )


SINGLE_WORKER = WorkerSlot()
