"""A table that is missing, half made, deleted during calls, or has another key: reported, and needs no restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from price_keeper.errors import InvalidStoreRequest, StoreMisconfigured
from price_keeper.stores import dynamodb_errors
from price_keeper.stores.schema import TABLES

from tests.support.commands import Sidecar
from tests.support.engines import Engines
from tests.support.sidecar_crashes import CrashLoad, SidecarSetup
from tests.support.sidecar_trials import (
    FaultTrial,
    call_once,
    create_table,
    create_tables,
    dynamodb,
    fetch,
    price_by_hand,
    read_dynamodb_usage,
    read_metric,
    read_readiness,
    run_trial,
    wait_until,
)

COUNTERS = "usage-agg-sharded"
WAITS = "spend cannot be flushed, and waits in the journal; the log says why"
MISSING = "a table is missing in DynamoDB; make it with: price-keeper tables create"


def test_missing_or_deleted_table_loses_nothing(engines: Engines, tmp_path: Path) -> None:
    endpoint, prefix = engines.endpoints["ministack"], f"tables-{tmp_path.name}-"
    create_tables(endpoint, prefix, without=COUNTERS)
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    client = dynamodb(endpoint)
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar(store=store)
        with lineup.run_sidecar() as running:
            first = _called_without_table(lineup, running)
            assert len(running.complaints) == running.errors.count(MISSING) == 1
            create_table(client, prefix, TABLES[COUNTERS])
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            assert _counted(endpoint, prefix) == _served(trial)
            went = _served(trial)
            client.delete_table(TableName=f"{prefix}{COUNTERS}")
            second = _called_without_table(lineup, running)
            # The log repeats a trouble after a minute at the earliest, which may not have passed since the first.
            assert running.errors.count(MISSING) in (1, 2)
            ends = running.errors.count("spend is flushed again, after ")
            assert len(running.complaints) == running.errors.count(MISSING) + ends
            assert ends == 1
            create_table(client, prefix, TABLES[COUNTERS])
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            assert running.stop() == 0
        served = _served(trial)
        assert served[0] == first + second
        assert _counted(endpoint, prefix) == (served[0] - went[0], served[1] - went[1])
    print(f"a table away twice: {first} and {second} calls during that time, none failed, none lost")


def _called_without_table(lineup: SidecarSetup, running: Sidecar) -> int:
    """How many were answered."""
    with CrashLoad(lineup, 3, random.Random(20261119)) as load:
        wait_until(lambda: len(load.complete_requests) > 20 and read_readiness(running.control)["journal"] == WAITS)
        assert fetch(running.control, "/ready")[0] == 503
        assert read_metric(running.control, "store_trouble") == 1
    assert load.failed_calls == 0
    return len(load.complete_requests)


def _served(trial: FaultTrial) -> tuple[int, int]:
    """Requests, and their cost in pico-dollars."""
    served = trial.read_used_requests()
    return len(served), sum(counts.pico for counts in price_by_hand(served).values())


def _counted(endpoint: str, prefix: str) -> tuple[int, int]:
    used = read_dynamodb_usage(endpoint, prefix)
    return used["requests"], used["pico"]


def test_table_with_other_key_is_reported_until_corrected(engines: Engines, tmp_path: Path) -> None:
    endpoint, prefix = engines.endpoints["ministack"], f"key-{tmp_path.name}-"
    create_tables(endpoint, prefix, without="config")
    client = dynamodb(endpoint)
    client.create_table(
        TableName=f"{prefix}config",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    with run_trial(tmp_path) as trial:
        lineup = trial.add_sidecar(store=store)
        with lineup.run_sidecar() as running:
            wait_until(
                lambda: read_readiness(running.control)["store"] == "the store is not as it should be; the log says why"
            )
            assert "another key than it should; see: price-keeper tables check" in running.errors
            assert call_once(lineup, lineup.token())[0] == 200
            client.delete_table(TableName=f"{prefix}config")
            create_table(client, prefix, TABLES["config"])
            wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
            assert running.stop() == 0
        assert _counted(endpoint, prefix) == _served(trial)


# As DynamoDB puts it; a local engine takes such writes, or says less.
OTHER_KEYS = [
    "The provided key element does not match the schema",
    "One or more parameter values were invalid: Missing the key id in the item",
    "One or more parameter values were invalid: Type mismatch for key pk expected: N actual: S",
    "Query condition missed key schema element: id",
]


@pytest.mark.parametrize("message", OTHER_KEYS)
def test_spend_waits_for_table_with_other_key(message: str) -> None:
    """A segment that is rejected for good would be left to a person, though the table alone is at fault."""
    reasons = [{"Code": "None"}, {"Code": "ValidationError", "Message": message}]
    single = {"Error": {"Code": "ValidationException", "Message": message}}
    several = {"Error": {"Code": "TransactionCanceledException", "Message": "..."}, "CancellationReasons": reasons}
    for answer, operation in ((single, "PutItem"), (several, "TransactWriteItems")):
        found = dynamodb_errors.translate_error(ClientError(answer, operation))
        assert isinstance(found, StoreMisconfigured)
        assert not isinstance(found, InvalidStoreRequest)
