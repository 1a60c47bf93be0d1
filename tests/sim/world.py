"""One run: a fleet, its store and Bedrock, what befalls them, and what has to hold all the time and at the end."""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from price_keeper.budgets import hard_label_selector
from price_keeper.budgets.budget_state import BudgetState
from price_keeper.config import Config
from price_keeper.errors import QuotaExceeded
from price_keeper.ledger import segment
from price_keeper.org_calendar import Period, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Update, Value

from tests.sim.bedrock import Bedrock, CallOutcome, prices_of
from tests.sim.disk import DISKS
from tests.sim.ledger import Ledger, Limits
from tests.sim.network import SharedStore, Weather, Wire, at_once
from tests.sim.scheduler import BEGINNING, Loop, Scheduler
from tests.sim.setup import LABELS, ORG, Setup
from tests.sim.sidecar import Life, Sidecar
from tests.sim.truth import Truth, Violation

RECENT = 60  # lines of the trace that are printed with a failure


@dataclass
class Settings:
    """Of the org, as people change them."""

    ordering: list[str]
    quotas: dict[str, int]
    is_sticky: bool
    enforcement: str
    limits: dict[str, Any] | None
    version: int = 1


@dataclass
class Figures:
    events: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)  # by how they ended
    faults: Counter[str] = field(default_factory=Counter)


class World:
    def __init__(self, setup: Setup, folder: Path, *, keeps_trace: bool = False) -> None:
        self.setup = setup
        self.folder = folder
        self.config = _CONFIG
        self.chance = random.Random(setup.seed)
        self.script = random.Random(~setup.seed)
        self.scheduler = Scheduler(lambda: self.chance.uniform(0.0001, 0.004))
        self.loop = Loop(self.scheduler)
        self.lives, self.numbers, self.names = count(1), count(1), count(1)
        self.trace_hash, self.recent = sha256(), deque[str](maxlen=None if keeps_trace else RECENT)
        self.figures = Figures()
        self.truth = Truth(lambda: self.scheduler.now, (load_zone(setup.zone), load_zone("UTC")))
        self.truth.quotas = dict(setup.quotas)
        self.store = SharedStore(self.truth)
        self.bedrock = Bedrock(self.chance, self.truth, prices_of(self.config.labels), self.trace)
        self.bedrock.odds = dict(setup.ways)
        self.limits = Limits(lambda: self.scheduler.now)
        self.settings = Settings(
            list(setup.quotas), dict(setup.quotas), setup.is_sticky, setup.enforcement, setup.limits
        )
        self.calendar = load_zone(setup.zone), Period(setup.period), setup.quota_scope, setup.shards
        self.last_trouble = -1e9
        self.is_soft_bound_kept = not any(abs(each) > 2.5 for each in setup.wrong_by)
        self.has_clock_far_off = any(abs(each) > 3000 for each in setup.wrong_by)
        self.are_limits_bound = True
        self._chance_bytes = random.Random(f"{setup.seed} of names")
        self.machines = [Sidecar(self, number) for number in range(setup.sidecars)]
        for machine, wrong_by in zip(self.machines, setup.wrong_by, strict=True):
            if setup.is_one_machine:
                machine.clock = self.machines[0].clock
            machine.clock.wrong_by = wrong_by

    # What all of it goes by.

    def wall(self) -> float:
        return self.setup.starts_at + self.scheduler.now - BEGINNING

    def random_bytes(self, size: int) -> bytes:
        return self._chance_bytes.randbytes(size)

    def trace(self, *details: object) -> None:
        line = f"{self.scheduler.now - BEGINNING:.4f} {' '.join(map(str, details))}"
        self.trace_hash.update(line.encode())
        self.recent.append(line)

    def admin(self) -> Wire:
        """The way of people's tools, on which nothing goes wrong."""
        weather = Weather(self.chance, {})
        return Wire("admin", self.store, self.truth, self.loop, weather, self.chance, self.trace)

    @property
    def running(self) -> list[Life]:
        return [life for machine in self.machines if (life := machine.running) is not None]

    def longest_delay(self, normal_secs: float) -> float:
        """Until all know that a soft quota is spent: a flush, an interval and its grace, the age of a total."""
        return 15 + 1.1 * normal_secs + 1 + max(100, 1.7 * self.setup.aggregate_secs) + 5

    def troubled(self) -> None:
        self.last_trouble = self.scheduler.now

    def set_clock(self, machine: Sidecar, wrong_by: float) -> None:
        """Of this machine, on which all of them may be."""
        if self.setup.is_one_machine:
            self.limits.clock_is_set(wrong_by - machine.clock.wrong_by)
        machine.clock.wrong_by = wrong_by
        self.has_clock_far_off |= abs(wrong_by) > 3000
        for each in self.machines:
            if wrong_by and each.life is not None and each.clock is machine.clock:
                each.life.is_out_of_time = True

    # What people do.

    def configure(self) -> None:
        settings, setup = self.settings, self.setup
        for label, quota in settings.quotas.items():
            self.truth.quotas[label] = max(quota, self.truth.quotas.get(label, 0))
        quotas: dict[str, Value] = dict(settings.quotas)
        changed: dict[str, Value] = {
            "timezone": setup.zone,
            "period": setup.period,
            "quota_scope": setup.quota_scope,
            "model_ordering": list(settings.ordering),
            "quotas": quotas,
            "sticky_fallback_enabled": settings.is_sticky,
            "enforcement": settings.enforcement,
            "version": settings.version,
            "agg_shard_count": setup.shards,
            "refresh_interval_normal_secs": setup.normal_secs,
        }
        if settings.limits is not None:
            changed["limits"] = dict(settings.limits)
            self._bound(settings.limits)
        at_once(self.store.update(Update(schema.org_config_key(ORG), set=changed)))
        for caller in setup.callers:
            own: dict[str, Value] = {"app_name": "an app", "version": settings.version}
            if settings.limits is not None and setup.app_limits:
                own["limits"] = dict(settings.limits)
            at_once(self.store.update(Update(schema.app_config_key(ORG, str(caller.app)), set=own)))

    def _bound(self, limits: dict[str, Any]) -> None:
        for name in ("rpm", "tpm"):
            capacity = max(1.0, limits[name] * limits["burst_secs"] / 60)
            self.limits.ledgers.setdefault(name, Ledger(capacity, limits[name] / 60))

    # What is found out.

    def call_is_over(self, life: Life, number: int, outcome: CallOutcome) -> None:
        how = "left" if outcome.is_disconnected else "cut" if outcome.was_cut else str(outcome.status)
        self.figures.calls[how] += 1
        self.trace(life.name, "call", number, how)

    def check(self) -> None:
        """Raises Violation."""
        for life in self.running:
            life.check()
        self.truth.check_hard()
        if self.are_limits_bound:
            for name, ledger in self.limits.ledgers.items():
                self.truth.check("a limit is kept", ledger.beyond <= 1e-6, name, ledger)
        if self.scheduler.failures:
            raise self.scheduler.failures[0]
        if self.truth.violations:
            raise Violation(self.truth.violations[0])

    def run_for(self, seconds: float) -> None:
        self.scheduler.run_until(self.scheduler.now + seconds)

    def gone_wrong(self) -> Counter[str]:
        """All faults, by kind."""
        found = Counter(self.figures.faults)
        for machine in self.machines:
            found.update({f"store {name}": number for name, number in machine.weather.met.items()})
        found.update({f"bedrock {name}": number for name, number in self.bedrock.met.items()})
        return found

    def end(self) -> None:
        """Nothing of it takes another turn, and no file of it stays open."""
        for machine in self.machines:
            if machine.life is not None and not machine.life.is_dead:
                machine.life.is_dead = True
                machine.life.disk.bury()


_DEVELOPMENT = Config.development()
_CONFIG = replace(
    _DEVELOPMENT,
    labels={name: replace(_DEVELOPMENT.labels[name], max_output_tokens=2000) for name in LABELS},
)


def _checked_refusal(truth: Truth) -> Callable[..., Any]:
    refused = BudgetState._build_spent_error

    def checked(state: BudgetState, asked: str, may: tuple[str, ...]) -> Any:
        refusal = refused(state, asked, may)
        if isinstance(refusal, QuotaExceeded):
            truth.check_refusal(state, dict.fromkeys(may, 1))
        return refusal

    return checked


def _checked_hard_refusal(truth: Truth) -> Callable[..., Any]:
    refused = hard_label_selector._build_refusal

    def checked(state: BudgetState, dry: Mapping[str, Any]) -> Any:
        refusal = refused(state, dry)
        if isinstance(refusal, QuotaExceeded):
            truth.check_refusal(state, {label: worst for label, (_, worst) in dry.items()})
        return refusal

    return checked


class Patches:
    """That a run needs, and no other one may see."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._patches = (
            mock.patch.object(os, "urandom", world.random_bytes),
            mock.patch.object(segment, "MIN_ROOM_BYTES", world.setup.room[0]),
            mock.patch.object(segment, "MAX_ROOM_BYTES", world.setup.room[1]),
            mock.patch.object(BudgetState, "_build_spent_error", _checked_refusal(world.truth)),
            mock.patch.object(hard_label_selector, "_build_refusal", _checked_hard_refusal(world.truth)),
        )

    def __enter__(self) -> None:
        DISKS.scheduler = self._world.scheduler
        random.seed(self._world.setup.seed)
        for patch in self._patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        self._world.end()
        DISKS.scheduler = None
        for patch in self._patches:
            with suppress(RuntimeError):
                patch.stop()
