"""The course of a soak: everything is started, its speed found, half of that kept up, and at the end all is counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.stores.dynamodb_tables import create_missing_tables

from bench.speed.machine import processor_seconds
from tests.soak.administrators import Administrators
from tests.soak.bedrock import bedrock_with_books
from tests.soak.books import Books
from tests.soak.fleet import Member
from tests.soak.harvest import Harvest, holds_calls
from tests.soak.links import Link, link
from tests.soak.load import MARKER, Load
from tests.soak.logs import check_logs
from tests.soak.processes import AtRest, Watched, at_rest, check_processes, rested, sampled, under_way, watched_of
from tests.soak.stored import check_hard_budget, compare_store
from tests.soak.tenants import A_CALL, AMPLE, APPS, FLIPPING, LIMITED, MODELS, SPENDING
from tests.soak.verdict import Verdict
from tests.soak.weather import Weather
from tests.support.engines import PREFIX
from tests.support.servers import ministack_server
from tests.support.simulated import BedrockProcess

NAMES = (("alone", 1), ("workers", 2), ("victim", 1))  # of sidecars, and their workers
CALLERS, ROUNDS, ROUND_SECONDS = 48, 3, 8.0  # while it is found out how fast it goes; the best round counts
FAIR_AFTER = 0.93  # of the time: from then on nothing goes wrong
FLIPS_AFTER = {FLIPPING: {"premium": 0.25}, SPENDING: {"premium": 0.5, "economy": 0.75}}  # of the time, about
SETTLED = 0.25  # of the time: from then on memory is to stay as it is
GATHERING_SECONDS = 2.0
NOTED_SECONDS = 3.0  # within which a sidecar has written new callers to its disk
REST_SECONDS = 120.0  # at most, after the load: connections are kept for a while
QUIET_SECONDS = 180.0  # within which whatever is under way has ended
IDLE_SECONDS = 40.0  # longer than connections to Bedrock stand by, so that none is there before the load


@dataclass
class Soak:
    seconds: float
    seed: str
    folder: Path
    verdict: Verdict = field(default_factory=Verdict)

    async def run(self) -> Verdict:
        async with AsyncExitStack() as stack:
            await self._set_up(stack)
            rate = await self._half_its_speed()
            before = [await at_rest(each) for each in watched_of(self.members)]
            processes = await self._go_on(rate)
            after = await self._settle(processes, before)
            check_processes(processes, before, after, self.seconds * SETTLED, self.verdict)
            await self._stop()
            await self._compare()
        return self.verdict

    @property
    def _totals_seconds(self) -> float:
        return min(10.0, self.seconds / 10)

    async def _set_up(self, stack: AsyncExitStack) -> None:
        self.bedrock: BedrockProcess = stack.enter_context(bedrock_with_books(self.folder / "bedrock"))
        endpoint = stack.enter_context(ministack_server(self.folder))
        opened = DynamoStore(region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=asyncio.sleep)
        dynamodb = await opened.open()
        stack.push_async_callback(dynamodb.close)
        await create_missing_tables(dynamodb.client, PREFIX, asyncio.sleep, lambda *_: None)
        self.store: Store = dynamodb
        self.bedrocks: list[Link] = [await stack.enter_async_context(link(self.bedrock.url)) for _ in NAMES]
        self.stores: list[Link] = [await stack.enter_async_context(link(endpoint)) for _ in NAMES]
        self.members = []
        for (name, workers), bedrock, store in zip(NAMES, self.bedrocks, self.stores, strict=True):
            settings = {"engine": "dynamodb", "endpoint": store.url, "region": "us-east-1", "table_prefix": PREFIX}
            member = Member(name, self.folder / name, bedrock.url, settings, workers, self._totals_seconds)
            stack.callback(member.end)
            self.members.append(member)
        await asyncio.gather(*(member.start() for member in self.members))
        self.people = await stack.enter_async_context(Administrators(self.members, self.seed))
        await self.people.settle_tenants()
        self.load = Load(self.members, self.seed, self.folder / "whole")
        self.weather = Weather(self.seed, self.seconds, self.members, self.bedrocks, self.stores, self.bedrock)
        self.harvest = Harvest(self.folder / "calls.db", self.members, MARKER.encode())
        stack.callback(self.harvest.db.close)
        self._gathering = asyncio.create_task(self._gather())

    async def _gather(self) -> None:
        while True:
            await asyncio.sleep(GATHERING_SECONDS)
            await asyncio.to_thread(self.harvest.gather)

    async def _half_its_speed(self) -> float:
        await asyncio.to_thread(self.bedrock.plan, always={"latency_ms": 20, "frame_ms": 1})
        each = min(ROUND_SECONDS, self.seconds / 10)
        speeds = [await self.load.as_fast_as_it_goes(CALLERS, each) for _ in range(ROUNDS)]
        rate = max(speeds) / 2
        self.verdict.figures["calls/s at full speed"] = round(max(speeds), 1)
        self.verdict.figures["calls/s kept up"] = round(rate, 1)
        print(f"seed {self.seed}: {2 * rate:.0f} calls/s at full speed, {rate:.0f} for {self.seconds:g} s", flush=True)
        await self.load.settled(QUIET_SECONDS)
        await under_way(self.members, QUIET_SECONDS)
        await asyncio.sleep(min(IDLE_SECONDS, self.seconds / 50))
        a_weight = rate / sum(each.weight for each in APPS)
        for app, shares in FLIPS_AFTER.items():
            calls = a_weight * app.weight * self.seconds / len(app.labels)
            quotas = {label: int(calls * share * A_CALL[label]) for label, share in shares.items()}
            await self.people.put(app, quotas=dict.fromkeys(MODELS, AMPLE) | quotas)
        await self.people.put(LIMITED, limits={"rpm": max(6, round(60 * a_weight * LIMITED.weight / 2))})
        self.load.apps = list(APPS)
        await self.load.introduce()
        await asyncio.sleep(NOTED_SECONDS)
        return rate

    async def _go_on(self, rate: float) -> list[Watched]:
        began = time.monotonic()
        until = began + self.seconds
        processes, *_ = await asyncio.gather(
            self._watch(began, until),
            self.load.at_a_pace(rate, until),
            self.weather.blow(began + self.seconds * FAIR_AFTER),
            self.people.go_on(until),
        )
        return processes

    async def _watch(self, began: float, until: float) -> list[Watched]:
        """From the moment on at which none of these processes is restarted any more."""
        await self.weather.has_rolled.wait()
        processes = watched_of(self.members)
        before = [processor_seconds(each.pid) for each in processes]
        since = time.monotonic()
        await sampled(processes, began, until)
        for each, spent in zip(processes, before, strict=True):
            with suppress(OSError):
                share = (processor_seconds(each.pid) - spent) / (time.monotonic() - since)
                self.verdict.figures[f"{each.name}: % of a core"] = round(100 * share, 1)
        return processes

    async def _settle(self, processes: list[Watched], before: list[AtRest]) -> list[AtRest]:
        for each in (*self.bedrocks, *self.stores):
            each.stop_faults()
        await asyncio.to_thread(self.bedrock.clear_plan)
        await self.load.settled(QUIET_SECONDS)
        left = await under_way(self.members, QUIET_SECONDS)
        faults, joined = left.pop("our_fault"), left.pop("joined")
        self.verdict.figures["retries that joined their call, since the last restart of each"] = joined
        busy = [f"{name} {count}" for name, count in left.items() if count]
        self.verdict.none("what is still under way when nobody calls any more", busy)
        self.verdict.none("refusals for a fault of the sidecar's own", int(faults))
        patience = min(REST_SECONDS, self.seconds)
        after = [await rested(each, first, patience) for each, first in zip(processes, before, strict=True)]
        await asyncio.sleep(2 * self._totals_seconds)
        return after

    async def _stop(self) -> None:
        statuses = await asyncio.gather(*(member.stop() for member in self.members))
        self.verdict.none("sidecars that did not end in order", [status for status in statuses if status])
        self._gathering.cancel()
        with suppress(asyncio.CancelledError):
            await self._gathering
        self.harvest.gather()
        left = [path for member in self.members for path in member.journal.rglob("*.seg") if holds_calls(path)]
        self.verdict.none("segments left in a journal", left)
        self.verdict.none("segments with a word of a prompt", self.harvest.leaked_prompts)
        check_logs(self.members, self.people.credentials, self.load.bearers.values(), self.seconds, self.verdict)

    async def _compare(self) -> None:
        self._tell()
        troubles = [*self.weather.troubles, *self.people.troubles, *self.load.counts.odd]
        self.verdict.none("what went otherwise than it should in the fleet, or with a client", troubles)
        books = Books(self.harvest.db, self.members, self.bedrocks, self.verdict)
        books.load(self.folder / "bedrock", self.folder / "whole")
        books.compare_calls()
        books.compare_days(self.people.zones)
        books.explain_estimates()
        await compare_store(self.store, self.harvest.db, self.people.submitted_usd_micros, self.verdict)
        await check_hard_budget(self.store, books.served(SPENDING), self.verdict)

    def _tell(self) -> None:
        figures, counts, people = self.verdict.figures, self.load.counts, self.people
        figures["requests"] = counts.asked.total()
        figures |= {f"requests, {kind.replace('_', ' ')}": count for kind, count in sorted(counts.asked.items())}
        figures |= {f"answers, {status}": count for status, count in sorted(counts.heard.items())}
        figures |= {f"served, {who}": count for who, count in sorted(counts.served.items())}
        figures["tries without a whole answer"] = counts.broken
        figures["tried again"] = counts.retried
        figures["given up after three tries"] = counts.given_up
        figures["callers who left"] = counts.left
        figures["not begun, as 400 were under way"] = counts.too_many
        figures["median, ms"] = round(counts.took.share(0.5) * 1000, 1)
        figures["99 % within, ms"] = round(counts.took.share(0.99) * 1000, 1)
        figures["asked of control ports"] = people.asked.total()
        figures |= {f"control answers, {status}": count for status, count in sorted(people.heard.items())}
        figures["events to status pages"] = people.events
        figures["connections that said nothing, shown out"] = people.silent_shown_out
        self.verdict.none("connections that said nothing and were left alone", people.silent_left_alone)
        figures |= {f"befell, {kind}": count for kind, count in sorted(self.weather.befell.items())}
        injected = sum((each.injected for each in (*self.bedrocks, *self.stores)), start=Counter[str]())
        figures["faults at the socket"] = injected.total()
        figures |= {f"socket, {kind}": count for kind, count in sorted(injected.items())}
        figures["processes killed, stopped or restarted"] = sum(len(member.ends) for member in self.members)
        figures["segments"] = self.harvest.segments
