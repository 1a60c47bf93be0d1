"""One seed, from its beginning to its end."""

from __future__ import annotations

import gc
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from price_keeper.ledger import recording

from tests.sim.disk import DISKS, disks
from tests.sim.ending import Ending
from tests.sim.script import Script
from tests.sim.setup import setup_of
from tests.sim.truth import TruthJournal
from tests.sim.world import Patches, World

COLLECTED_AFTER = 25  # seeds


@dataclass
class Outcome:
    """`failure` is what was violated, or raised; empty if all held."""

    seed: int
    focus: str
    failure: str = ""
    trace_hash: str = ""
    recent: list[str] = field(default_factory=list)
    simulated_seconds: float = 0.0
    events: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)
    turns: int = 0


@contextmanager
def stage() -> Iterator[Path]:
    """For any number of seeds: a folder, in memory where there is such a place; nothing is logged or garbage-collected.
    To be had in a process of its own, which has the disks of all others on it."""
    in_memory = Path("/dev/shm")
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # of coroutines that ended with their process
    warnings.simplefilter("ignore", RuntimeWarning)  # of what never came to its turn
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with (
            tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None) as folder,
            disks(),
            mock.patch.object(recording, "Journal", lambda *given: TruthJournal(DISKS.scheduler.current, *given)),
        ):
            yield Path(folder)
    finally:
        gc.enable()


_played = 0


def played(
    seed: int, folder: Path, focus: str | None = None, *, keeps_trace: bool = False, is_collected: bool = True
) -> Outcome:
    """On a stage. `is_collected`: its garbage, after some seeds."""
    global _played
    setup = setup_of(seed, focus)
    place = folder / "world"
    place.mkdir()
    world = World(setup, place, keeps_trace=keeps_trace)
    outcome = Outcome(seed, setup.focus)
    with Patches(world):
        try:
            _play(world)
        except Exception as failure:
            outcome.failure = f"{type(failure).__name__}: {failure}"
            if keeps_trace:
                import traceback

                world.recent.append(traceback.format_exc())
    shutil.rmtree(place)
    outcome.trace_hash, outcome.recent = world.trace_hash.hexdigest(), list(world.recent)
    outcome.simulated_seconds = world.scheduler.now - 1000.0
    outcome.events, outcome.calls = dict(world.figures.events), dict(world.figures.calls)
    outcome.faults, outcome.checks = dict(world.gone_wrong()), dict(world.truth.checks)
    outcome.turns = world.scheduler.turns
    _played += 1
    if is_collected and _played % COLLECTED_AFTER == 0:
        gc.collect()
    return outcome


def _play(world: World) -> None:
    world.configure()
    script = Script(world)
    for machine in world.machines:
        machine.start()
    world.run_for(0.2)
    for _ in range(world.setup.steps):
        script.step()
    Ending(world).comes()
