"""What befalls a world, step by step: calls, and all that goes wrong. The dice are the seed's."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from price_keeper.budgets.active_label import clear_override, set_override
from price_keeper.domain import Scope
from price_keeper.errors import ConditionFailed, ConfigError, StoreError, TransactionFailed
from price_keeper.ledger.lease_file import release_former_leases
from price_keeper.ledger.recovery import recover
from price_keeper.ledger.segment_sender import SegmentSender
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores.contract import Store

from tests.sim import network
from tests.sim.bedrock import request
from tests.sim.network import Wire
from tests.sim.setup import LABELS, ORG
from tests.sim.sidecar import Clock, Life, Sidecar

if TYPE_CHECKING:
    from tests.sim.world import World

WAITS = (0.0, 0.01, 0.2, 1.0, 1.0, 2.0, 3.0, 9.0)


class Script:
    def __init__(self, world: World) -> None:
        self.world, self.chance, self.setup = world, world.script, world.setup
        self.snapshots: list[tuple[Sidecar, Path]] = []
        is_calm = self.setup.focus == "calm"
        has_snapshots = self.setup.focus == "journal"
        steps = (
            self._ordinary()
            | (self._of_people() if is_calm else self._troubles())
            | (self._of_snapshots() if has_snapshots else {})
        )
        self._steps, self._weights = list(steps), [weight for weight, _ in steps.values()]
        self._does = {name: work for name, (_, work) in steps.items()}

    def _ordinary(self) -> dict[str, tuple[int, Callable[[], object]]]:
        return {
            "calls": (50, self._calls),
            "a caller leaves": (4, self._leaves),
            "a call is repeated": (3, self._repeats),
            "a start": (12, self._starts),
        }

    def _troubles(self) -> dict[str, tuple[int, Callable[[], object]]]:
        journal = 3 if self.setup.focus == "journal" else 1
        return {
            "a kill": (2 * journal, self._kills),
            "a kill at a write": (4 * journal, self._kills_at_a_write),
            "a stop": (2, self._stops),
            "a drain": (2, self._drains),
            "a start without the store": (2, self._starts_without_store),
            "going on": (4, self._goes_on),
            "a full disk": (1 * journal, self._fills),
            "a disk that cannot sync": (1 + journal, self._cannot_sync),
            "room again": (2, self._has_room),
            "a partition": (2, self._cuts_off),
            "its end": (3, self._joins),
            "faults of the store": (6, self._meets),
            "a fault of a write": (30 if self.setup.focus == "sticky" else 6, self._meets_at_a_write),
            "bedrock goes": (1, self._bedrock_goes),
            "bedrock comes": (2, self._bedrock_comes),
            "a clock jumps": (1, self._jumps),
            "quotas change": (2, self._changes_quotas),
            "the ordering changes": (1, self._changes_ordering),
            "sticky fallback is switched": (1, self._switches_sticky),
            "a budget becomes hard": (1, self._becomes_hard),
            "limits change": (1, self._changes_limits),
            "an override": (1, self._overrides),
            "an override ends": (1, self._clears),
            "a replay elsewhere": (2, self._replays),
        }

    def _of_people(self) -> dict[str, tuple[int, Callable[[], object]]]:
        """So often that processes have to follow without a refresh of their own."""
        return {"an override": (6, self._overrides), "an override ends": (4, self._clears)}

    def _of_snapshots(self) -> dict[str, tuple[int, Callable[[], object]]]:
        """In some worlds only: a process that counts a copy twice until it flushes keeps fewer promises."""
        return {
            "a snapshot": (6, self._takes_snapshot),
            "a replay of a snapshot": (6, self._replays_snapshot),
        }

    def step(self) -> None:
        name = self.chance.choices(self._steps, self._weights)[0]
        if self._does[name]() is not False:
            self.world.figures.events[name] += 1
            self.world.trace("--", name)
        self.world.run_for(self.chance.choice(WAITS))
        self.world.check()

    # Who.

    def _machine(self) -> Sidecar:
        return self.chance.choice(self.world.machines)

    def _running(self) -> Life | None:
        running = self.world.running
        return self.chance.choice(running) if running else None

    def _troubled(self, what: str) -> None:
        self.world.figures.faults[what] += 1
        self.world.troubled()

    # Calls.

    def _calls(self) -> object:
        life = self._running()
        if life is None or life.is_stopping:
            return False
        for _ in range(self.chance.randint(1, self.setup.calls_at_most)):
            self._call(life)
        return True

    def _call(self, life: Life, invocation: int | None = None) -> None:
        some = self.chance.choice
        label, caller = some(self.setup.asked), self.chance.randrange(len(self.setup.callers))
        most = some((None, 10, 300, 2000)) if self.setup.enforcement != "hard" else some((10, 100, 600))
        asked = request(label, caller, some((10, 200, 2000)), most, some((1, 20, 150, 300, 999)), invocation)
        life.takes(next(self.world.numbers), asked)

    def _repeats(self) -> object:
        """Of one invocation, so that it joins what is under way."""
        life = self._running()
        if life is None or life.is_stopping:
            return False
        state = self.chance.getstate()
        for _ in range(2):
            self.chance.setstate(state)
            self._call(life, 7)
        return True

    def _leaves(self) -> object:
        life = self._running()
        if life is None or not life.calls:
            return False
        life.calls[self.chance.choice(list(life.calls))].leaves()
        return True

    # Processes.

    def _starts(self) -> object:
        dead = [machine for machine in self.world.machines if machine.life is None or machine.life.is_over]
        if not dead:
            return False
        self.chance.choice(dead).start()
        return True

    def _starts_without_store(self) -> None:
        machine = self._machine()
        if machine.life is not None:
            machine.life.die()
        machine.weather.is_cut_off = True
        machine.start()
        self._troubled("starts without the store")

    def _living(self) -> Life | None:
        life = self._machine().life
        return life if life is not None and not life.is_dead else None

    def _kills(self) -> object:
        life = self._living()
        if life is None:
            return False
        self._troubled("kills")
        life.die()
        return True

    def _kills_at_a_write(self) -> object:
        machine = self._machine()
        if machine.life is None or machine.life.is_over:
            machine.start()  # so that it dies while it recovers
        life = machine.life
        if life is None or life.is_dead:
            return False
        self._troubled("kills at a write")
        life.disk.dies_in, life.disk.tear = self.chance.randrange(14), self.chance.choice((0.0, 0.5, 0.95, 1.0))
        return True

    def _stops(self) -> object:
        life = self._living()
        if life is None or life.loop.is_stopped:
            return False
        self._troubled("stops")
        life.loop.is_stopped = life.is_out_of_time = True
        return True

    def _goes_on(self) -> object:
        stopped = [machine.life for machine in self.world.machines if machine.life and machine.life.loop.is_stopped]
        if not stopped:
            return False
        self.world.troubled()
        self.chance.choice(stopped).loop.go_on()
        return True

    def _drains(self) -> object:
        life = self._running()
        if life is None or life.is_stopping:
            return False
        self.world.troubled()
        life.is_stopping = True
        life.loop.call_soon(life.stop.set)
        return True

    # Disks, clocks and the network.

    def _fills(self) -> None:
        machine = self._machine()
        machine.is_disk_full = True
        if machine.life is not None:
            machine.life.disk.is_full = True
        self._troubled("full disks")

    def _cannot_sync(self) -> object:
        life = self._running()
        if life is None:
            return False
        life.disk.cannot_sync = True
        self._troubled("disks that cannot sync")
        return True

    def _has_room(self) -> None:
        machine = self._machine()
        machine.is_disk_full = False
        if machine.life is not None:
            machine.life.disk.is_full = machine.life.disk.cannot_sync = False
        self.world.troubled()

    def _jumps(self) -> None:
        machine = self._machine()
        by = self.chance.choice((-3600.0, -5.0, -1.0, 1.0, 5.0, 3600.0))
        self.world.set_clock(machine, machine.clock.wrong_by + by)
        self.world.is_soft_bound_kept = False
        self._troubled("clocks that jump")

    def _cuts_off(self) -> None:
        self._machine().weather.is_cut_off = True
        self._troubled("partitions")

    def _joins(self) -> None:
        self._machine().weather.is_cut_off = False
        self.world.troubled()

    def _meets(self) -> None:
        machine = self._machine()
        machine.weather.next += [self.chance.choice(network.FAULTS)] * self.chance.choice((1, 1, 2, 4))
        self.world.troubled()

    def _meets_at_a_write(self) -> None:
        table, fault = self.chance.choice(network.WRITTEN), self.chance.choice(network.FAULTS)
        if self.setup.focus == "sticky":  # which is seldom written, and may go back only by late writes
            table, fault = "sticky-state", self.chance.choice(("late", "twice"))
        self._machine().weather.aimed[table] = fault
        self.world.troubled()

    def _bedrock_goes(self) -> None:
        self.world.bedrock.is_down = True
        self._troubled("bedrock is down")

    def _bedrock_comes(self) -> None:
        self.world.bedrock.is_down = False

    # People.

    def _changed(self) -> None:
        self.world.settings.version += 1
        self.world.is_soft_bound_kept = False
        self.world.configure()

    def _changes_quotas(self) -> None:
        settings, truth = self.world.settings, self.world.truth
        label, factor = self.chance.choice(list(settings.quotas)), self.chance.choice((0.5, 2, 2, 3))
        truth.is_quota_lowered |= factor < 1
        settings.quotas[label] = round(settings.quotas[label] * factor)
        self._changed()

    def _changes_ordering(self) -> None:
        settings = self.world.settings
        self.chance.shuffle(settings.ordering)
        self._changed()

    def _switches_sticky(self) -> None:
        self.world.settings.is_sticky = not self.world.settings.is_sticky
        self._changed()

    def _becomes_hard(self) -> object:
        if self.world.settings.enforcement == "hard":
            return False
        self.world.settings.enforcement = "hard"
        self._changed()
        return True

    def _changes_limits(self) -> object:
        limits = self.world.settings.limits
        if limits is None:
            return False
        factor = self.chance.choice((0.5, 2))
        self.world.settings.limits = limits | {name: max(1, round(limits[name] * factor)) for name in ("rpm", "tpm")}
        self.world.are_limits_bound = False
        self._changed()
        return True

    def _overrides(self) -> None:
        label, hours = self.chance.choice(LABELS), self.chance.choice((None, 0.01, 1))
        self.world.loop.create_task(self._override(label, hours))

    async def _override(self, label: str, hours: float | None) -> None:
        scope, today, now = self._scope(), self._today(), self.world.wall()
        store, clock = cast(Store, self.world.admin()), Clock(self.world)
        until = None if hours is None else now + hours * 3600
        with suppress(ConfigError, StoreError):
            arguments = store, clock, scope, today, label, "why", "who", until
            await set_override(*arguments, ordering=self.world.settings.ordering)

    def _clears(self) -> None:
        self.world.loop.create_task(self._clear())

    async def _clear(self) -> None:
        with suppress(ConditionFailed, TransactionFailed):
            await clear_override(cast(Store, self.world.admin()), self._scope(), self._today(), Clock(self.world))

    def _scope(self) -> Scope:
        caller = self.chance.choice(self.setup.callers)
        return Scope(ORG, caller.app if self.setup.quota_scope == "APP" else None)

    def _today(self):  # type: ignore[no-untyped-def]
        return find_span(Period(self.setup.period), self.world.wall(), load_zone(self.setup.zone))

    def _replays(self) -> object:
        """The disk of a dead process is found, copied, and replayed elsewhere as well."""
        dead = [each for each in self.world.machines if each.life is not None and each.life.is_dead]
        if not dead:
            return False
        machine = self.chance.choice(dead)
        if not machine.folder.exists():
            return False
        self._begins_replay(machine, machine.folder, gives_back=True)
        return True

    def _takes_snapshot(self) -> object:
        """Of a disk, whether its process lives or not."""
        machine = self._machine()
        if not machine.folder.exists():
            return False
        self.snapshots.append((machine, self._copy_of(machine.folder)))
        return True

    def _replays_snapshot(self) -> object:
        """However old it is by now. Its process may still spend, so nothing is returned."""
        if not self.snapshots:
            return False
        machine, folder = self.chance.choice(self.snapshots)
        self._troubled("replays of snapshots")
        self.world.truth.has_replayed_snapshot = True
        self._begins_replay(machine, folder, gives_back=False)
        return True

    def _copy_of(self, folder: Path) -> Path:
        return Path(shutil.copytree(folder, self.world.folder / f"copy{next(self.world.names)}"))

    def _begins_replay(self, machine: Sidecar, folder: Path, *, gives_back: bool) -> None:
        world, copy = self.world, self._copy_of(folder)
        weather = network.Weather(world.chance, self.setup.odds)
        wire = Wire(machine.name, world.store, world.truth, world.loop, weather, world.chance, world.trace)
        world.loop.create_task(self._replay(copy, cast(Store, wire), gives_back))

    async def _replay(self, folder: Path, store: Store, gives_back: bool) -> None:
        clock = Clock(self.world)
        sender = SegmentSender(store, clock)
        with suppress(StoreError):
            for sealed in recover(folder).sealed:
                await sender.send(sealed)
            if gives_back and not (sender.rejected or sender.outdated_folders):
                await release_former_leases(store, clock, folder)
