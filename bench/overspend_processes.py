"""Real sidecars on one store, called by boto3 until all have left the label whose quota is spent.

What was spent is what the simulated Bedrock's ledger says, priced by hand.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bedrock_simulator import Keys
from price_keeper.stores.sqlite import SqliteStore

from tests.support.budget_fleet import put_budget
from tests.support.commands import Sidecar
from tests.support.overspend import Figures
from tests.support.sidecar_crashes import MODELS, ORG, PRICES, SidecarSetup
from tests.support.simulated import BedrockProcess, BotoCaller, bedrock_process, read_ledger
from tests.support.threads import ThreadGroup

CALLS_A_SECOND = 24.0  # of the whole fleet
SPENT_IN_SECONDS = 30
MOST_SECONDS = 60
QUIET_SECONDS = 6  # without a call of the dearer label: then all sidecars know
CALL_MS = 500
CALLERS_A_SIDECAR = 2
FLUSH_SECONDS = 15.0  # at most, by default
TURN = {"messages": [{"role": "user", "content": [{"text": "Tell me what a budget is."}]}]}
TOKENS = ("input_tokens", "output_tokens")
_LOOKS = re.compile(r'^\w*budget_looks_total\{failed="false"\} (\d+)', re.MULTILINE)


def cost(entry: dict[str, Any]) -> float:
    """USD, by hand: nothing is cached in this load."""
    usage = entry.get("usage")
    if not usage or entry["model"] != MODELS["premium"]:
        return 0.0
    prices = PRICES["premium"]
    return float(usage["input_tokens"] * prices["input"] + usage["output_tokens"] * prices["output"]) / 10**6


class Watch:
    """What each sidecar says of when it looked at the store."""

    def __init__(self, sidecars: list[Sidecar]) -> None:
        self._sidecars = sidecars
        self._counts = [0] * len(sidecars)
        self.looks: list[list[float]] = [[time.time()] for _ in sidecars]

    def look(self) -> None:
        for number, sidecar in enumerate(self._sidecars):
            with urllib.request.urlopen(f"{sidecar.control}/metrics", timeout=5) as answer:
                found = _LOOKS.search(answer.read().decode())
            looks = int(found.group(1)) if found else 0
            if looks > self._counts[number]:
                self._counts[number] = looks
                self.looks[number].append(time.time())

    def longest(self, reached: float, last_served: float) -> float:
        """From one look to the next, of those that were going on when the quota was reached, or began soon after."""
        gaps = [
            after - before
            for looks in self.looks
            for before, after in zip(looks, [*looks[1:], last_served], strict=True)
            if before <= last_served and after >= reached
        ]
        return max(gaps, default=0.0)


class Calls(ThreadGroup):
    """Clients in threads, each at its own even pace."""

    def __init__(self, lineups: list[SidecarSetup], token: str) -> None:
        super().__init__()
        self.failures = 0
        clients = [lineup for lineup in lineups for _ in range(CALLERS_A_SIDECAR)]
        pause = len(clients) / CALLS_A_SECOND
        self._threads = [
            threading.Thread(target=self._call_on, args=(lineup, token, pause, pause * number / len(clients)))
            for number, lineup in enumerate(clients)
        ]

    def _call_on(self, lineup: SidecarSetup, token: str, pause: float, first: float) -> None:
        caller = BotoCaller(lineup.url, keys=Keys("any", "any", token))
        due = time.monotonic() + first
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                due += pause
                try:
                    caller.call_blocking("converse", {"modelId": "premium", **TURN})
                except Exception:  # what it was is in the sidecar's log; it is none of the spend
                    self.failures += 1
        finally:
            caller.client.close()


def cost_of_one_call(bedrock: BedrockProcess, ledger: Path) -> float:
    caller = BotoCaller(bedrock.url)
    caller.call_blocking("converse", {"modelId": MODELS["premium"], **TURN})
    caller.client.close()
    while not read_ledger(ledger)[-1]["is_done"]:  # which it notes after the answer has gone out
        time.sleep(0.01)
    return cost(read_ledger(ledger)[-1])


async def _set_up(path: Path, quota: float) -> None:
    store = await SqliteStore(path, time.time).open()
    await put_budget(store, ORG, {"premium": quota, "economy": 1000})
    await store.close()


def _lineup(folder: Path, bedrock: str, store: Path) -> SidecarSetup:
    folder.mkdir()
    lineup = SidecarSetup(folder, bedrock, {"engine": "sqlite", "path": str(store)})
    lineup.write_config(journal={"dir": "journal"})
    return lineup


def measured_of_processes(number: int) -> tuple[float, float, Figures]:
    """The quota, what was spent, and the figures of the run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file, store = folder / "ledger", folder / "store.db"
        bedrock = stack.enter_context(bedrock_process("--ledger", str(file)))
        each = cost_of_one_call(bedrock, file)
        bedrock.plan(always={"latency_ms": CALL_MS})
        # Whole micro-dollars, as a quota is.
        quota = round(each * CALLS_A_SECOND * SPENT_IN_SECONDS, 6)
        asyncio.run(_set_up(store, quota))
        lineups = [_lineup(folder / f"s{sidecar}", bedrock.url, store) for sidecar in range(number)]
        watch = Watch([stack.enter_context(lineup.run_sidecar()) for lineup in lineups])
        with Calls(lineups, lineups[0].token()) as calls:
            began = time.time()
            while time.time() - began < MOST_SECONDS and not _is_over(file, quota + each):
                watch.look()
                time.sleep(0.25)
        print(f"{calls.failures} calls failed; {each:.6f} USD a call")
        return quota, *_figures(read_ledger(file)[1:], quota, watch)


def _served(file: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_ledger(file) if cost(entry)]


def _is_over(file: Path, quota: float) -> bool:
    served = _served(file)
    return sum(map(cost, served)) > quota and time.time() - served[-1]["arrived"] > QUIET_SECONDS


def _figures(entries: list[dict[str, Any]], quota: float, watch: Watch) -> tuple[float, Figures]:
    served = [entry for entry in entries if cost(entry)]
    spent, so_far, reached = sum(map(cost, served)), 0.0, served[-1]["arrived"]
    for entry in served:
        so_far += cost(entry)
        if so_far >= quota:
            reached = entry["arrived"] + CALL_MS / 1000
            break
    in_flight = sum(cost(entry) for entry in served if reached - CALL_MS / 1000 < entry["arrived"] <= reached)
    before = [entry for entry in served if entry["arrived"] <= reached]
    burn = sum(map(cost, before)) / (reached - before[0]["arrived"])
    refresh = watch.longest(reached, served[-1]["arrived"])
    return spent, Figures(burn, FLUSH_SECONDS, refresh, 0.0, in_flight)
