"""A sidecar that begins while the store is away knows the budgets of whomever those before it on its disk have met."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.budgets.budget_snapshot import BudgetSnapshot, SnapshotFile
from price_keeper.clock import SystemClock
from price_keeper.domain import PICO_PER_MICRO, Scope
from price_keeper.ledger.aggregator import sum_shards
from price_keeper.ledger.ledger_entries import Counter
from price_keeper.org_calendar import Period, find_span, load_zone
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Store, Value

from tests.support.commands import Sidecar
from tests.support.engines import PREFIX, Engines
from tests.support.gate import Gate
from tests.support.hard_budget_processes import noon_time_zone
from tests.support.sidecar_crashes import SECRET, SidecarSetup
from tests.support.sidecar_trials import FaultTrial, read_metric, run_trial, wait_until
from tests.support.workers import kill_with_workers

QUOTA = 5_000_000  # micro-USD, and so many times what all calls of a test may cost
TURN = {"messages": [{"role": "user", "content": [{"text": "hello"}]}], "inferenceConfig": {"maxTokens": 50}}
TOKENS = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", time.time)
CALLS_EACH = 4
REFUSED = (503, "ServiceUnavailableException", "a hard budget is not spent from while the store does not answer")
AWAY = [REFUSED, (200, "economy", ""), *[(200, "premium", "")] * 3]  # for each of `Tenants.away`


class Tenants:
    """Three orgs: a hard budget, one for all apps together, and a chain whose first label is soon spent."""

    def __init__(self) -> None:
        self.hard, self.shared, self.chain, self.stranger = (str(uuid4()) for _ in range(4))
        self.day = find_span(Period.DAY, time.time(), load_zone(noon_time_zone())).key

    @property
    def away(self) -> list[tuple[str, str]]:
        """Who calls while the store is away: orgs and apps. Of the last two nothing was ever known here."""
        apps = [(org, "web") for org in (self.hard, self.chain, self.shared)]
        return [*apps, (self.shared, "never-met"), (self.stranger, "web")]

    async def put(self, store: Store) -> None:
        await self._put(store, self.hard, {"premium": QUOTA}, enforcement="hard")
        await self._put(store, self.shared, {"premium": QUOTA}, quota_scope="ORG")
        await self._put(store, self.chain, {"premium": 1, "economy": QUOTA})

    async def _put(self, store: Store, org: str, quotas: dict[str, Value], **more: Value) -> None:
        item = {"timezone": noon_time_zone(), "model_ordering": [*quotas], "quotas": quotas, "version": 1, **more}
        await store.put(Put(schema.org_config_key(org), item))

    def are_noted(self, notes: BudgetSnapshot) -> bool:
        stood = notes.find_budget(Scope(self.chain, "web"), self.day)
        is_moved = stood is not None and stood.sticky_item.get("active_model_label") == "economy"
        return is_moved and all(notes.find_settings(Scope(org)) for org in (self.hard, self.shared))


def called(lineup: SidecarSetup, org: str, app: str = "web") -> tuple[int, str, str]:
    """Its status, and the label that served it, or the kind of error and what is said of it."""
    connection = http.client.HTTPConnection("127.0.0.1", lineup.port, timeout=10)
    headers = {"Authorization": f"Bearer {TOKENS.mint_access(org, app).token}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/model/premium/converse", json.dumps(TURN), headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status == 200:
        return 200, answer.headers["x-price-keeper-label"], ""
    return answer.status, answer.headers.get("x-amzn-errortype", ""), str(json.loads(body)["message"])


def at_once(lineup: SidecarSetup, *callers: tuple[str, str]) -> list[tuple[int, str, str]]:
    with ThreadPoolExecutor(len(callers)) as pool:
        return [*pool.map(lambda each: called(lineup, *each), callers)]


def noted(lineup: SidecarSetup) -> BudgetSnapshot:
    snapshot_file = SnapshotFile(lineup.journal, SystemClock())
    asyncio.run(snapshot_file.open())
    return snapshot_file.snapshot


@contextmanager
def with_tenants(engines: Engines, folder: Path) -> Iterator[tuple[FaultTrial, SidecarSetup, Gate, Tenants]]:
    tenants = Tenants()

    async def put() -> None:
        async with engines.open("ministack", folder) as store:
            await tenants.put(store)

    asyncio.run(put())
    with run_trial(folder) as trial, Gate(engines.endpoints["ministack"]) as gate:
        store = {"engine": "dynamodb", "endpoint": gate.url, "region": "us-east-1", "table_prefix": PREFIX}
        yield trial, trial.add_sidecar(store=store), gate, tenants


def meets(lineup: SidecarSetup, tenants: Tenants) -> int:
    """How many calls that took."""
    assert called(lineup, tenants.hard) == (200, "premium", "")
    assert called(lineup, tenants.shared) == (200, "premium", "")
    calls = 2

    def has_moved() -> bool:
        nonlocal calls
        calls += 1  # of several workers each notes what it knows, and looks when it is called
        return called(lineup, tenants.chain)[1] == "economy" and tenants.are_noted(noted(lineup))

    wait_until(has_moved)
    return calls


def end(running: Sidecar, how: signal.Signals) -> None:
    if how is signal.SIGTERM:
        assert running.stop() == 0
        return
    kill_with_workers(running.process.pid)
    running.process.wait()


@pytest.mark.parametrize(("how", "workers"), [(signal.SIGTERM, 1), (signal.SIGKILL, 2)], ids=["stopped", "killed"])
def test_start_during_outage_knows_budgets_from_snapshot(
    engines: Engines, tmp_path: Path, how: signal.Signals, workers: int
) -> None:
    with with_tenants(engines, tmp_path) as (trial, lineup, gate, tenants):
        lineup.options = ("--workers", str(workers))
        with lineup.run_sidecar() as running:
            calls = meets(lineup, tenants)
            end(running, how)
        gate.shut()
        lineup.options = ()
        with lineup.run_sidecar() as running:
            answers = at_once(lineup, *(each for each in tenants.away for _ in range(CALLS_EACH)))
            assert answers == [each for each in AWAY for _ in range(CALLS_EACH)]
            assert read_metric(running.control, "scopes_stale") >= 3
            assert f"budget of ORG#{tenants.hard}#APP#web is restored from the snapshot" in running.errors
            gate.open()
            wait_until(lambda: called(lineup, tenants.hard)[0] == 200)
            assert running.stop() == 0
            assert "Traceback" not in running.errors
        hard, shared, apps = asyncio.run(_counted(engines, tmp_path, tenants))
        assert shared == apps == 1 + 2 * CALLS_EACH
        assert hard >= 2
        assert len(trial.read_used_requests()) == calls + 4 * CALLS_EACH + hard - 1
        assert sorted(path.name for path in lineup.journal.glob("notes-*")) == ["notes-0"]


async def _counted(engines: Engines, folder: Path, tenants: Tenants) -> tuple[int, int, int]:
    """Calls: under the hard budget, of the org whose apps share one, and of those apps."""

    async def of(scope: Scope) -> int:
        found = await sum_shards(store, Counter(scope.key, "premium", tenants.day, 8))
        assert found["cost_usd_micros"] * PICO_PER_MICRO >= 0
        return int(found["requests"])

    async with engines.open("ministack", folder) as store:
        apps = [await of(Scope(tenants.shared, app)) for app in ("web", "never-met")]
        return await of(Scope(tenants.hard, "web")), await of(Scope(tenants.shared)), sum(apps)
