"""What two running sidecars ask of DynamoDB: counted by a proxy between them and one engine, in real time.

Each of the apps has one counter. Busy: each app calls each sidecar once in `--pause` seconds. Idle: nobody calls, and
the counters have spend of three hours ago. `--flip`: how long the second sidecar takes to follow the first to the next
label. Read units are computed from what the engine answers, by DynamoDB's rules; write units are what the engine says.

Run as: python -m bench.store_requests --counters 220 --pause 10
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.domain import Scope
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.stores.contract import Store
from price_keeper.stores.dynamodb_expressions import item_from_wire, key_from_wire
from price_keeper.stores.item_values import check_item

from tests.support.budget_fleet import put_budget
from tests.support.clock import ManualClock
from tests.support.engines import PREFIX, TEST_CREDENTIALS, Engines
from tests.support.metered_store import READ_BYTES
from tests.support.recording_harness import open_recording_harness
from tests.support.servers import ministack_server
from tests.support.sidecar_crashes import ORG, SECRET, SidecarSetup
from tests.support.simulated import bedrock_process

SIDECARS, SHARDS, HOUR = 2, 8, 3600
SPEND_AGE_SECONDS = 3 * HOUR  # of idle counters
FLIPS, FLIPS_AT_ONCE, FLIP_CALL_SECONDS = 50, 5, 0.2
FLIP_QUOTA_USD = 0.02  # which LONG_TEXT costs at once, and short calls not at all soon
SHORT_TEXT, LONG_TEXT = "hello", "word " * 8000
READS = {"GetItem", "BatchGetItem", "Query"}


@dataclass
class StoreProxy:
    """Passes requests on to the engine and counts them."""

    endpoint: str
    url: str = ""
    requests: Tally[str] = field(default_factory=Tally)  # by operation and tables
    refused: Tally[str] = field(default_factory=Tally)  # by operation: conditions that failed, mostly
    items: Tally[tuple[str, str]] = field(default_factory=Tally)  # by operation and table
    read_units: float = 0.0
    write_units: float = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[StoreProxy]:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        operation = request.headers["X-Amz-Target"].partition(".")[2]
        asked = orjson.loads(await request.read())
        headers = {name: request.headers[name] for name in ("X-Amz-Target", "Content-Type", "Authorization")}
        data = orjson.dumps(asked | ({} if operation in READS else {"ReturnConsumedCapacity": "TOTAL"}))
        async with self._session.post(self.endpoint, data=data, headers=headers) as answer:
            content = await answer.read()
            self.count(operation, asked, orjson.loads(content), is_refused=answer.status != 200)
            kept = {name: it for name, it in answer.headers.items() if name.lower().startswith("x-amz")}
            return web.Response(body=content, status=answer.status, headers=kept, content_type=answer.content_type)

    def count(self, operation: str, asked: dict[str, Any], answer: dict[str, Any], *, is_refused: bool) -> None:
        name = f"{operation} {', '.join(sorted(find_tables(asked)))}"
        self.requests[name] += 1
        if is_refused:
            self.refused[name] += 1
            return
        match operation:
            case "GetItem":
                items = [answer["Item"]] if "Item" in answer else []
                self._count_read(operation, asked["TableName"], items, 1, asked)
            case "BatchGetItem":
                for table, wanted in asked["RequestItems"].items():
                    self._count_read(operation, table, answer["Responses"].get(table, []), len(wanted["Keys"]), wanted)
            case "Query":
                self._count_query(asked, answer["Items"])
            case "TransactWriteItems":
                for write in asked["TransactItems"]:
                    (each,) = write.values()
                    self.items[operation, each["TableName"].removeprefix(PREFIX)] += 1
                self.write_units += sum(each["CapacityUnits"] for each in answer["ConsumedCapacity"])
            case "PutItem" | "UpdateItem" | "DeleteItem":
                self.items[operation, asked["TableName"].removeprefix(PREFIX)] += 1
                self.write_units += answer["ConsumedCapacity"]["CapacityUnits"]

    def _count_read(self, operation: str, table: str, found: Sequence[Any], wanted: int, asked: dict[str, Any]) -> None:
        table = table.removeprefix(PREFIX)
        self.items[operation, table] += wanted
        units = sum(-(-measure_item(table, wire) // READ_BYTES) for wire in found) + wanted - len(found)
        self.read_units += units if asked.get("ConsistentRead") else units / 2

    def _count_query(self, asked: dict[str, Any], found: Sequence[Any]) -> None:
        table = asked["TableName"].removeprefix(PREFIX)
        self.items["Query", table] += len(found)
        units = -(-max(1, sum(measure_item(table, wire) for wire in found)) // READ_BYTES)
        self.read_units += units if asked.get("ConsistentRead") else units / 2

    def reset(self) -> None:
        for tally in (self.requests, self.refused, self.items):
            tally.clear()
        self.read_units = self.write_units = 0.0


def find_tables(asked: dict[str, Any]) -> set[str]:
    writes = [each for write in asked.get("TransactItems", []) for each in write.values()]
    named = {each["TableName"] for each in (asked, *writes) if "TableName" in each}
    return {name.removeprefix(PREFIX) for name in (named or asked.get("RequestItems", []))}


def measure_item(table: str, wire: dict[str, Any]) -> int:
    """Its bytes, as DynamoDB charges them."""
    return check_item(key_from_wire(table, wire), item_from_wire(wire))


@dataclass
class Fleet:
    """Two sidecars, the store behind their proxy, and the apps that call them."""

    setups: list[SidecarSetup]
    store: Store
    proxy: StoreProxy
    session: aiohttp.ClientSession
    failures: Tally[int] = field(default_factory=Tally)  # by status
    calls: int = 0

    def __post_init__(self) -> None:
        self._service = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time)
        self._tokens: dict[str, str] = {}

    async def call(self, app: str, sidecar: int, text: str = SHORT_TEXT) -> str:
        """The label that served; empty after an error."""
        if app not in self._tokens:
            self._tokens[app] = self._service.mint_access(ORG, app).token
        body = {"messages": [{"role": "user", "content": [{"text": text}]}], "inferenceConfig": {"maxTokens": 1}}
        headers = {"Authorization": f"Bearer {self._tokens[app]}"}
        self.calls += 1
        url = f"{self.setups[sidecar].url}/model/premium/converse"
        async with self.session.post(url, json=body, headers=headers) as answer:
            await answer.read()
            if answer.status != 200:
                self.failures[answer.status] += 1
            return answer.headers.get("x-price-keeper-label", "")

    async def call_steadily(self, apps: Sequence[str], pause: float) -> None:
        """Each app calls each sidecar once in `pause` seconds, at even distances, until this is cancelled."""
        turns = [(app, sidecar) for app in apps for sidecar in range(SIDECARS)]
        random.Random(1).shuffle(turns)
        began, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(max(0.0, began + number * pause / len(turns) - time.monotonic()))
                group.create_task(self.call(*turns[number % len(turns)]))
                number += 1


@asynccontextmanager
async def open_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Sidecars with the default configuration. What blocks runs in threads, as this loop serves the proxy."""
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())
        endpoint = await asyncio.to_thread(processes.enter_context, ministack_server(folder))
        bedrock = await asyncio.to_thread(processes.enter_context, bedrock_process("--no-auth"))
        store = await stack.enter_async_context(Engines({"ministack": endpoint}).open("ministack", folder))
        proxy = await stack.enter_async_context(StoreProxy(endpoint).running())
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        settings = {"engine": "dynamodb", "endpoint": proxy.url, "table_prefix": PREFIX}
        setups = [SidecarSetup(folder / f"sidecar{number}", bedrock.url, settings) for number in range(SIDECARS)]
        yield Fleet(setups, store, proxy, session)


async def start_sidecars(fleet: Fleet, stack: AsyncExitStack) -> None:
    for setup in fleet.setups:
        setup.folder.mkdir()
        setup.write_config(journal={"dir": "journal"})
        running = setup.run_sidecar()
        await asyncio.to_thread(running.__enter__)
        stack.push_async_callback(asyncio.to_thread, running.__exit__, None, None, None)


async def seed(store: Store, folder: Path, apps: Sequence[str]) -> None:
    """Spend of three hours ago in all counters, and their totals, as a process leaves them that ended in order."""
    clock = ManualClock(time.time() - SPEND_AGE_SECONDS)
    day = time.strftime("DAY#%Y%m%d", time.gmtime(clock.now()))
    aggregator = Aggregator(store, clock, 60)
    async with open_recording_harness(folder / "seed", store, clock) as recording:
        recording.flusher.sender.subscribe_written(aggregator.note_written)
        for app in apps:
            recording.spend(10**6, Counter(Scope(ORG, app).key, "premium", day, SHARDS))
        assert await recording.flusher.flush()
    await aggregator.run(is_last=True)


async def count_requests(folder: Path, counters: int, pause: float, warm: float, seconds: float) -> None:
    apps = [f"app-{number}" for number in range(counters)]
    async with open_fleet(folder) as fleet, AsyncExitStack() as stack:
        await put_budget(fleet.store, ORG, {"premium": 10**6}, quota_scope="APP")
        if not pause:
            await seed(fleet.store, folder, apps)
        await start_sidecars(fleet, stack)
        calls = asyncio.create_task(fleet.call_steadily(apps, pause)) if pause else None
        await asyncio.sleep(warm)
        fleet.proxy.reset()
        fleet.calls, began = 0, time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        report(fleet, counters, pause, took)
        if calls is not None:
            calls.cancel()
            await asyncio.wait([calls])


def report(fleet: Fleet, counters: int, pause: float, took: float) -> None:
    proxy, each = fleet.proxy, HOUR / took
    state = f"each app calls each sidecar once in {pause:g} s" if pause else "nobody calls"
    print(f"\n{counters:,} counters, {state}; counted for {took:.0f} s, per hour and per counter:")
    for (operation, table), number in sorted(proxy.items.items()):
        print(f"  {operation} {table}: {number * each:,.0f} items, {number * each / counters:,.2f}")
    for operation, number in sorted(proxy.requests.items()):
        print(f"  {operation}: {number * each:,.0f} requests, {proxy.refused[operation] * each:,.0f} of them refused")
    print(f"  read units: {proxy.read_units * each:,.0f}, {proxy.read_units * each / counters:,.2f}")
    print(f"  write units: {proxy.write_units * each:,.0f}, {proxy.write_units * each / counters:,.2f}")
    print(f"  calls: {fleet.calls * each:,.0f}; failed ones by status: {dict(fleet.failures)}", flush=True)


async def measure_flips(folder: Path) -> None:
    """The second sidecar serves a call of an app every FLIP_CALL_SECONDS; one call to the first spends the quota."""
    took: list[tuple[float, float]] = []
    async with open_fleet(folder) as fleet, AsyncExitStack() as stack:
        await put_budget(fleet.store, ORG, {"premium": FLIP_QUOTA_USD, "economy": 10**6}, quota_scope="APP")
        await start_sidecars(fleet, stack)
        for start in range(0, FLIPS, FLIPS_AT_ONCE):
            apps = [f"flip-{number}" for number in range(start, start + FLIPS_AT_ONCE)]
            took += await asyncio.gather(*(measure_flip(fleet, app) for app in apps))
        print(f"calls: {fleet.calls}; failed ones by status: {dict(fleet.failures)}")
    for title, numbers in zip(("the first moved", "the quota was spent"), zip(*took, strict=True), strict=True):
        ordered = sorted(numbers)
        print(f"followed after {title}: {ordered[FLIPS // 2]:.1f} s (median), {ordered[-1]:.1f} s at most, of {FLIPS}")


async def measure_flip(fleet: Fleet, app: str) -> tuple[float, float]:
    """Seconds until the second sidecar serves the next label, since the first does so, and since the quota is spent."""
    mover, follower = range(SIDECARS)
    assert await fleet.call(app, mover) == "premium"
    serves_until = time.monotonic() + random.uniform(7, 12)
    while time.monotonic() < serves_until:
        assert await fleet.call(app, follower) == "premium"
        await asyncio.sleep(FLIP_CALL_SECONDS)

    async def wait_for_next_label(sidecar: int) -> float:
        while True:
            if await fleet.call(app, sidecar) != "premium":
                return time.monotonic()
            await asyncio.sleep(FLIP_CALL_SECONDS)

    await fleet.call(app, mover, LONG_TEXT)
    spent_at = time.monotonic()
    moved_at, followed_at = await asyncio.gather(*map(wait_for_next_label, (mover, follower)))
    return followed_at - moved_at, followed_at - spent_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counters", type=int, default=220)
    parser.add_argument("--pause", type=float, default=0.0, help="between two calls of an app to a sidecar; 0: idle")
    parser.add_argument("--warm", type=float, default=120.0, help="seconds that are not counted")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--flip", action="store_true")
    given = parser.parse_args()
    os.environ.update(TEST_CREDENTIALS)
    with tempfile.TemporaryDirectory() as name:
        if given.flip:
            asyncio.run(measure_flips(Path(name)))
        else:
            asyncio.run(count_requests(Path(name), given.counters, given.pause, given.warm, given.seconds))


if __name__ == "__main__":
    main()
