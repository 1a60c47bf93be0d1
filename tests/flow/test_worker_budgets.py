"""Several workers on one quota, one limit, one hard budget: what one of them lets through the others count as well."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from price_keeper.stores import schema
from price_keeper.stores.contract import Value
from price_keeper.stores.sqlite import SqliteStore

from tests.support.budget_fleet import put_budget, put_item
from tests.support.overspend import Figures, bound
from tests.support.sidecar_crashes import MODELS, ORG, PRICES, SidecarSetup
from tests.support.simulated import BotoCaller, bedrock_process, read_ledger
from tests.support.threads import ThreadGroup
from tests.support.workers import WorkerProcesses, build_setup, run_workers, wait_until

CALLS = 400  # for which the quota lasts
CALLERS = 8
CALL_MS = 150
FLUSH_SECONDS = 0.3  # at most, as `Lineup` has it
QUIET_SECONDS = 3.0  # without a call of the dearer label: then both know
MESSAGES = [{"role": "user", "content": [{"text": "hello"}]}]
_READS = re.compile(r'^\w*budget_looks_total{worker="(\d)",failed="false"} (\d+)', re.MULTILINE)


def cost(entry: dict[str, Any]) -> float:
    """USD, by hand: nothing is cached in this load."""
    usage, prices = entry.get("usage"), PRICES["premium"]
    if not usage or entry["model"] != MODELS["premium"]:
        return 0.0
    return float(usage["input_tokens"] * prices["input"] + usage["output_tokens"] * prices["output"]) / 10**6


class Calls(ThreadGroup):
    """Each call on a connection of its own, so that it may come to either worker."""

    def __init__(self, workers: WorkerProcesses) -> None:
        super().__init__()
        self.dearer_at = time.monotonic()
        self.statuses: set[int] = set()
        self._crew = workers
        self._threads = [threading.Thread(target=self._call_on) for _ in range(CALLERS)]

    def _call_on(self) -> None:
        while not self._stop.is_set():
            status, label = self._crew.call()
            self.statuses.add(status)
            if label == "premium":
                self.dearer_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.dearer_at > QUIET_SECONDS


class BudgetReads:
    """When each worker was seen to have looked at the store."""

    def __init__(self) -> None:
        self._counts = {"0": 0, "1": 0}
        self._at = {number: [time.time()] for number in self._counts}

    def look(self, workers: WorkerProcesses) -> None:
        for number, count in _READS.findall(workers.metrics()):
            if int(count) > self._counts[number]:
                self._counts[number] = int(count)
                self._at[number].append(time.time())

    def longest(self, reached: float, last: float) -> float:
        """From one to the next, of those that were going on when the quota was reached, or began soon after."""
        pairs = [pair for at in self._at.values() for pair in zip(at, [*at[1:], last], strict=True)]
        return max((after - before for before, after in pairs if before <= last and after >= reached), default=0.0)


def test_two_workers_share_quota_like_two_sidecars(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as bedrock:
        quota = _quota(bedrock.url, file)
        bedrock.plan(always={"latency_ms": CALL_MS})
        lineup, reads = build_setup(tmp_path, bedrock.url, 2), BudgetReads()
        asyncio.run(_budgeted(lineup, quota))
        with run_workers(lineup) as workers:
            with Calls(workers) as calls:
                wait_until(lambda: reads.look(workers) or calls.is_over)
            shares = workers.samples("recorded_requests_total")
            assert workers.running.stop() == 0
    served = [entry for entry in read_ledger(file)[1:] if cost(entry)]
    figures = _figures(served, quota, reads)
    spent = sum(map(cost, served))
    print(f"quota {quota:g}, spent {spent:g}, bound {bound(figures):g} of {figures}; {shares}")
    assert calls.statuses == {200}
    assert min(shares.values()) > 0.2 * sum(shares.values())  # so each had to learn of much that it did not spend
    assert quota <= spent <= quota + bound(figures)
    assert spent < 1.5 * quota  # would each count its own alone, it were twice as much, however seldom they look


def _quota(bedrock: str, file: Path) -> float:
    caller = BotoCaller(bedrock)
    caller.call_blocking("converse", {"modelId": MODELS["premium"], "messages": MESSAGES})
    caller.client.close()
    wait_until(lambda: read_ledger(file)[-1].get("is_done"))
    return round(cost(read_ledger(file)[-1]) * CALLS, 6)


async def _budgeted(lineup: SidecarSetup, quota: float, **more: Value) -> None:
    quotas = {"premium": quota} if more else {"premium": quota, "economy": 1000}
    store = await SqliteStore(lineup.folder / "price-keeper.db", time.time).open()
    await put_budget(store, ORG, quotas, **more)
    await store.close()


def _figures(served: list[dict[str, Any]], quota: float, reads: BudgetReads) -> Figures:
    so_far, reached = 0.0, served[-1]["arrived"]
    for entry in served:
        so_far += cost(entry)
        if so_far >= quota:
            reached = entry["arrived"] + CALL_MS / 1000
            break
    before = [entry for entry in served if entry["arrived"] <= reached]
    in_flight = sum(cost(entry) for entry in before if entry["arrived"] > reached - CALL_MS / 1000)
    burn = sum(map(cost, before)) / (reached - before[0]["arrived"])
    return Figures(burn, FLUSH_SECONDS, reads.longest(reached, served[-1]["arrived"]), 0.0, in_flight)


WORKERS = 3
RPM = 60
HARD_CALLS = 20  # that a hard budget lasts for, if they had long answers
MOST = 240  # calls: a third of them alone, for each worker, would be more than there is for all


def _asked(workers: WorkerProcesses) -> Counter[int]:
    """By status. Each on a connection of its own, so that it may come to any worker."""
    with ThreadPoolExecutor(CALLERS) as callers:
        return Counter(status for status, _ in callers.map(lambda _: workers.call(), range(MOST)))


def test_rate_limit_is_shared_by_workers(tmp_path: Path) -> None:
    async def limited() -> None:
        store = await SqliteStore(tmp_path / "price-keeper.db", time.time).open()
        await put_item(store, schema.org_config_key(ORG), limits={"rpm": RPM})
        await store.close()

    with bedrock_process() as bedrock:
        lineup = build_setup(tmp_path, bedrock.url, WORKERS)
        asyncio.run(limited())
        with run_workers(lineup) as workers:
            began = time.monotonic()
            statuses = _asked(workers)
            seconds, shares = time.monotonic() - began, workers.samples("recorded_requests_total")
            assert workers.running.stop() == 0
    print(f"{statuses} in {seconds:.1f} s; {shares}")
    assert set(statuses) == {200, 429}
    assert all(shares.values())
    assert RPM / 2 < statuses[200] <= RPM * (1 + seconds / 60)


def test_hard_budget_is_shared_by_workers(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    with bedrock_process("--ledger", str(file)) as bedrock:
        quota = _quota(bedrock.url, file) / CALLS * HARD_CALLS
        bedrock.plan(always={"latency_ms": 20})
        lineup = build_setup(tmp_path, bedrock.url, WORKERS)
        asyncio.run(_budgeted(lineup, quota, enforcement="hard"))
        with run_workers(lineup) as workers:
            workers.turn = json.dumps({"messages": MESSAGES, "inferenceConfig": {"maxTokens": 100}}).encode()
            statuses, shares = _asked(workers), workers.samples("requests_total")
            assert workers.running.stop() == 0
    spent = sum(map(cost, read_ledger(file)[1:]))
    print(f"quota {quota:g}, spent {spent:g}; {statuses}; {shares}")
    assert set(statuses) <= {200, 400, 429}
    assert len(shares) == WORKERS  # each was asked, though one may have held all there is
    assert all(shares.values())
    assert quota / 8 < spent <= quota  # what is held for calls under way may be most of so small a budget
