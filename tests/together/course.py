"""The course of it: both versions serve under load, are killed, and take over each other's folders; then all is
compared."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from price_keeper.domain import PICO_PER_MICRO
from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.stores.dynamodb_tables import create_missing_tables
from price_keeper.stores.sqlite import SqliteStore

from tests.soak.bedrock import bedrock_with_books
from tests.soak.books import Books
from tests.soak.harvest import Harvest, holds_calls
from tests.soak.links import Link
from tests.soak.load import MARKER, Load
from tests.soak.logs import check_logs
from tests.soak.stored import check_hard_budget, compare_store, find_stale_totals, sweep_totals
from tests.soak.tenants import APPS, LIMITED, SPENDING
from tests.soak.verdict import Verdict
from tests.support.engines import PREFIX
from tests.support.gate import Gate
from tests.support.servers import ministack_server
from tests.together.clients import LIMITED_RPM, Clients
from tests.together.versions import NEW, Version, VersionedMember

ENGINES = ("sqlite", "ministack")
SWAPS = 4
LATENCY_MS = 25  # so that every kill meets calls under way
TOTALS_SECONDS, NO_TOTALS_SECONDS = 2.0, 3600.0
QUIET_SECONDS = 60.0  # within which what is under way has ended, and what was spent is in the store
SUBMISSION_PAUSE_SECONDS = 0.5
LONGEST_SECONDS = 900.0  # of all that is not the load
HARD_CALLERS, REFUSALS = 4, 10
CALLS_ALONE, SECONDS_ALONE = 40, 2.0


@dataclass
class Course:
    engine: str
    old: Version
    calls: int
    seconds: float
    seed: str
    folder: Path
    verdict: Verdict = field(default_factory=Verdict)
    gate: Gate | None = None  # on the way to the store

    async def run(self) -> Verdict:
        async with AsyncExitStack() as stack, asyncio.timeout(LONGEST_SECONDS + self.seconds):
            await self._set_up(stack)
            await self._serve_together()
            for reader, writer in ((self.old, NEW), (NEW, self.old)):
                await self._sum_up_alone(reader, writer)
            await self._run_commands()
            await self._compare()
        return self.verdict

    async def _set_up(self, stack: AsyncExitStack) -> None:
        self.bedrock = stack.enter_context(bedrock_with_books(self.folder / "bedrock"))
        await asyncio.to_thread(self.bedrock.plan, always={"latency_ms": LATENCY_MS, "frame_ms": 1})
        settings = await self._open_store(stack)
        self.members = [
            VersionedMember(
                name, self.folder / name, self.bedrock.url, settings, totals_seconds=TOTALS_SECONDS, version_in_use=each
            )
            for name, each in (("a", self.old), ("b", NEW))
        ]
        for member in self.members:
            stack.callback(member.end)
            stack.enter_context(member.copying_segments())
            await member.start()  # the old one first: the store is as it makes it
        if self.engine == "sqlite":
            self.store: Store = await SqliteStore(self.folder / "price-keeper.db", time.time).open()
            stack.push_async_callback(self.store.close)
        older, newer = self.members
        self.people = Clients(older, newer, self.verdict)
        self.zones = await asyncio.to_thread(self.people.settle_tenants, self.calls)
        self.load = self._open_load(self.members, "whole-together")
        self.harvest = Harvest(self.folder / "calls.db", list(self.members), MARKER.encode())
        stack.callback(self.harvest.db.close)

    def _tell(self, stage: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.engine}: {stage}", flush=True)

    async def _open_store(self, stack: AsyncExitStack) -> dict[str, Any]:
        if self.engine == "sqlite":
            return {"path": str(self.folder / "price-keeper.db")}
        endpoint = stack.enter_context(ministack_server(self.folder))
        opened = await DynamoStore(
            region="us-east-1", table_prefix=PREFIX, endpoint=endpoint, sleep=asyncio.sleep
        ).open()
        stack.push_async_callback(opened.close)
        await create_missing_tables(opened.client, PREFIX, asyncio.sleep, lambda *_: None)
        self.store = opened
        self.gate = stack.enter_context(Gate(endpoint))
        return {"engine": "dynamodb", "endpoint": self.gate.url, "region": "us-east-1", "table_prefix": PREFIX}

    def _open_load(self, members: list[VersionedMember], file: str) -> Load:
        load = Load(list(members), f"{self.seed} {file}", self.folder / file)
        load.apps = list(APPS)
        return load

    # Together.

    async def _serve_together(self) -> None:
        self._tell("load")
        began = time.monotonic()
        await self.load.introduce()
        until = time.monotonic() + self.seconds
        submitting = asyncio.create_task(self._submit_usage(until))
        await asyncio.gather(self.load.at_a_pace(self.calls / self.seconds, until), self._kill_and_swap(), submitting)
        await self.load.settled(QUIET_SECONDS)
        await self._exhaust_hard_budget()
        first, second = self.members
        for issuer, other in ((first, second), (second, first)):
            await asyncio.to_thread(self.people.check_session, issuer, other)
        await asyncio.to_thread(self.people.check_org_key)
        await self._until_flushed(self.members)
        await self._stop()
        self._check_load(time.monotonic() - began)

    async def _exhaust_hard_budget(self) -> None:
        """However few of its calls the machine has served until now."""
        load = self._open_load(self.members, "whole-hard")
        load.apps = [SPENDING]
        until = time.monotonic() + QUIET_SECONDS
        while load.counts.heard.total() - load.counts.heard["200"] < REFUSALS and time.monotonic() < until:
            await load.as_fast_as_it_goes(HARD_CALLERS, 0.5)
        await load.settled(QUIET_SECONDS)
        refused = {status: count for status, count in load.counts.heard.items() if status != "200"}
        is_so = sum(refused.values()) >= REFUSALS
        self.verdict.holds("calls refused by a hard budget", f"at least {REFUSALS}", refused, is_so=is_so)

    async def _submit_usage(self, until: float) -> None:
        number = 0
        while time.monotonic() < until:
            if all(member.is_up for member in self.members):
                number += 1
                await self._retried_submission(number)
            await asyncio.sleep(SUBMISSION_PAUSE_SECONDS)
        self.verdict.figures["usage submitted to both"] = number

    async def _retried_submission(self, number: int) -> None:
        """Until both have accepted it; either may be killed in between."""
        while True:
            try:
                return await asyncio.to_thread(self.people.submit_usage, number)
            except OSError:
                await asyncio.sleep(SUBMISSION_PAUSE_SECONDS)

    async def _kill_and_swap(self) -> None:
        began = time.monotonic()
        for number in range(1, SWAPS + 1):
            await asyncio.sleep(max(0.0, began + number * self.seconds / (SWAPS + 1) - time.monotonic()))
            await asyncio.gather(*(member.kill() for member in self.members))
            for member in self.members:
                self._copy_journal(member, number)
            first, second = self.members
            first.version_in_use, second.version_in_use = second.version_in_use, first.version_in_use
            if number % 2 == 0:  # else what is left is recovered by the version that starts there
                replays = (
                    asyncio.to_thread(each.run, each.version_in_use, "replay", "journal") for each in self.members
                )
                await asyncio.gather(*replays)
            await self._start_again(is_store_away=self.gate is not None and number == SWAPS - 1)
        self.verdict.figures["processes killed"] = sum(len(member.ends) for member in self.members)

    async def _replay_journals(self) -> None:
        """Each where it is, by the version whose turn it is there."""
        for member in self.members:
            await asyncio.to_thread(member.run, member.version_in_use, "replay", "journal")

    def _copy_journal(self, member: VersionedMember, number: int) -> None:
        """As one of several workers', so that one command replays all of them."""
        place = len(self.members) * number + self.members.index(member)
        shutil.copytree(member.journal, self.folder / "copies" / f"worker-{place}")

    async def _start_again(self, *, is_store_away: bool) -> None:
        if not is_store_away:
            await asyncio.gather(*(member.start() for member in self.members))
            return
        assert self.gate is not None
        self.gate.shut()
        await asyncio.gather(*(member.start() for member in self.members))
        for member in self.members:
            await asyncio.to_thread(self.people.check_snapshot, member)
        self.gate.open()

    async def _until_flushed(self, members: list[VersionedMember]) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while any([await asyncio.to_thread(member.read_metric, "unflushed_usd") for member in members]):
            assert time.monotonic() < deadline, "what was spent does not come into the store"
            await asyncio.sleep(0.2)

    async def _stop(self) -> None:
        statuses = await asyncio.gather(*(member.stop() for member in self.members))
        self.verdict.none("sidecars that did not end in order", [status for status in statuses if status])

    def _check_load(self, seconds: float) -> None:
        figures, counts = self.verdict.figures, self.load.counts
        figures["requests"] = counts.asked.total()
        figures |= {f"answers, {status}": count for status, count in sorted(counts.heard.items())}
        figures |= {f"served, {who}": count for who, count in sorted(counts.served.items())}
        figures["tries without a whole answer"], figures["tried again"] = counts.broken, counts.retried
        self.verdict.none("what a client could make nothing of", list(counts.odd))
        for who in ("flipping premium", "flipping economy", "spending premium", "limited economy"):
            self.verdict.holds(f"calls served, {who}", "some", counts.served[who], is_so=counts.served[who] > 0)
        most = LIMITED_RPM * (1 + seconds / 60)
        reached = counts.served["limited economy"]
        self.verdict.holds(f"calls of {LIMITED.name} served", f"at most {most:.0f}", reached, is_so=reached <= most)
        refused = counts.heard["429 ThrottlingException"]
        self.verdict.holds("calls refused by limits", "some", refused, is_so=refused > 0)

    # Each sums up alone what the other one adds.

    async def _sum_up_alone(self, reader: Version, writer: Version) -> None:
        self._tell(f"{reader.name} sums up alone")
        summing, adding = self.members
        summing.version_in_use, summing.totals_seconds = reader, TOTALS_SECONDS
        adding.version_in_use, adding.totals_seconds = writer, NO_TOTALS_SECONDS
        await asyncio.gather(*(member.start() for member in self.members))
        load = self._open_load([adding], f"whole-{writer.name}")
        await load.introduce()
        await load.at_a_pace(CALLS_ALONE / SECONDS_ALONE, time.monotonic() + SECONDS_ALONE)
        await load.settled(QUIET_SECONDS)
        await self._until_flushed([adding])
        if reader is not NEW:
            await self._until_totals_are_right()
        await self._stop()
        if reader is NEW:  # which sums up soon what it added itself, and all the rest after the day
            await sweep_totals(self.store)
        stale = await find_stale_totals(self.store)
        self.verdict.none(f"totals that {reader.name} leaves wrong when {writer.name} adds", stale)

    async def _until_totals_are_right(self) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while await find_stale_totals(self.store):
            await asyncio.sleep(0.2)
            if time.monotonic() > deadline:
                return

    # Commands.

    async def _run_commands(self) -> None:
        """Both versions report the same, and no copy of a journal is counted again."""
        self._tell("commands")
        await self._replay_journals()  # what a process that stopped soon after its start has not given back
        before = await self._report()
        for version in (NEW, self.old):
            folder = shutil.copytree(self.folder / "copies", self.folder / f"copies-{version.name}")
            words = ("replay", str(folder), "--owner-is-dead")
            counts = await asyncio.to_thread(self.members[0].run, version, *words)
            known = counts["repeated_parts"]
            self.verdict.holds(f"parts that {version.name} finds in the store already", "some", known, is_so=known > 0)
        after = await self._report()
        self.verdict.holds("spend after replays of copies", "the same", before == after, is_so=before == after)
        reported = sum(Decimal(row["cost_usd_micros"]) for row in after) * PICO_PER_MICRO
        self.verdict.figures["pico-dollars that both versions report"] = reported

    async def _report(self) -> list[dict[str, Any]]:
        words = ("spend", "today", "--by", "org,app,label")
        reports = await asyncio.gather(
            *(asyncio.to_thread(self.members[0].run, each, *words) for each in (self.old, NEW))
        )
        rows, others = (sorted(report["rows"], key=lambda row: (row["app"], row["label"])) for report in reports)
        self.verdict.holds("spend as both versions report it", "the same", rows == others, is_so=rows == others)
        return rows

    # The books.

    async def _compare(self) -> None:
        self._tell("books")
        self.harvest.gather()
        left = [path for member in self.members for path in member.journal.rglob("*.seg") if holds_calls(path)]
        self.verdict.none("segments left in a journal", left)
        self.verdict.none("segments with a word of a prompt", self.harvest.leaked_prompts)
        self.verdict.figures["segments"] = self.harvest.segments
        whole = [path.read_text() for path in self.folder.glob("whole-*")]
        (self.folder / "whole").write_text("".join(whole))
        ways = [Link("", 0) for _ in self.members]  # on which nothing goes wrong
        books = Books(self.harvest.db, list(self.members), ways, self.verdict)
        books.load(self.folder / "bedrock", self.folder / "whole")
        books.compare_calls()
        books.compare_days(self.zones)
        books.explain_estimates()
        await compare_store(self.store, self.harvest.db, self.people.submitted_usd_micros, self.verdict)
        await check_hard_budget(self.store, books.served(SPENDING), self.verdict)
        share = self.verdict.figures["of the hard budget of premium spent, %"]
        self.verdict.holds("% of a hard budget that was spent", "at least 80", share, is_so=share >= 80)
        self._compare_report()
        credentials = ":".join(self.people.credentials.values())
        check_logs(self.members, credentials, self.load.bearers.values(), self.seconds, self.verdict)

    def _compare_report(self) -> None:
        recorded = self.harvest.db.execute("select sum(pico) from receipts").fetchone()[0]
        wanted = recorded + self.people.submitted_usd_micros * PICO_PER_MICRO
        difference = self.verdict.figures["pico-dollars that both versions report"] - wanted
        self.verdict.holds("pico-dollars between spend and all calls", "0", difference, is_so=difference == 0)
