"""How long the control API takes with 8 ms for each request to the store, beside what the schema document allows.

The API and its client share one process and core, so that a busy machine shows in every figure: look at the number of
requests to the store too, which `tests/flow/test_control_waits.py` holds.

Run as: python -m bench.store_waits
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.busy_org import APPS, open_busy_org
from tests.support.control_harness import API, ORG, ControlHarness, ControlResponse

DELAY_SECONDS, SHARDS, TIMES = 0.008, 64, 100


class Questions:
    """One request of each kind by its number. Access tokens differ, so each is new to the process."""

    def __init__(self, api: ControlHarness) -> None:
        self._api = api
        self._retrieval_tokens: list[str] = []

    async def create_apps(self) -> None:
        """For their secrets."""
        for number in range(TIMES):
            made = await self._api.ask("PUT", f"{API}/apps/new-{number}", {"app_name": "New"})
            self._retrieval_tokens.append(made.body["secret_retrieval_token"])

    async def check_token(self, number: int) -> ControlResponse:
        """Of another app: nothing but the check is done."""
        return await self._api.ask("GET", f"{API}/apps/x/model-selection", who=(ORG, f"app-{number % APPS}"))

    async def select_model(self, number: int) -> ControlResponse:
        app = f"app-{number % APPS}"
        return await self._api.ask("GET", f"{API}/apps/{app}/model-selection", who=(ORG, app))

    async def submit_usage(self, number: int) -> ControlResponse:
        app = f"app-{number % APPS}"
        usage = {"request_id": f"r-{number}", "label": "premium", "input_tokens": 1, "output_tokens": 1}
        return await self._api.ask("POST", f"{API}/apps/{app}/usage", usage, who=(ORG, app))

    async def read_aggregates(self, _: int) -> ControlResponse:
        return await self._api.ask("GET", f"{API}/aggregates/today", who=(ORG, None))

    async def retrieve_secret(self, number: int) -> ControlResponse:
        token = {"X-Retrieval-Token": self._retrieval_tokens[number]}
        return await self._api.ask("GET", f"{API}/apps/new-{number}/credentials/secret", who=None, headers=token)


async def run(folder: Path) -> None:
    async with open_busy_org(folder, SHARDS, DELAY_SECONDS) as (api, store):
        questions = Questions(api)
        kinds: tuple[tuple[str, int, int, Callable[[int], Awaitable[ControlResponse]]], ...] = (
            ("token check", 20, 403, questions.check_token),
            ("model selection", 120, 200, questions.select_model),
            ("usage submission", 75, 201, questions.submit_usage),
            ("aggregates of today", 220, 200, questions.read_aggregates),
            ("secret retrieval", 100, 200, questions.retrieve_secret),
        )
        print("| | allowed ms | 99 of 100 ms | median ms | most requests one after the other |\n|---|---|---|---|---|")
        for title, allowed, wanted, ask in kinds:
            took, rounds = [], 0
            if ask == questions.retrieve_secret:
                await questions.create_apps()
            for number in range(TIMES):
                store.reset()
                began = time.perf_counter()
                answer = await ask(number)
                took.append((time.perf_counter() - began) * 1e3)
                rounds = max(rounds, store.rounds)
                assert answer.status == wanted, (answer.status, answer.body)
            took.sort()
            print(f"| {title} | {allowed} | {took[98]:.1f} | {took[49]:.1f} | {rounds} |", flush=True)
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(run(Path(name)))
