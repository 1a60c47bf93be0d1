"""A table that is not there, half made, deleted while calls go on, or has another key: it is told, and mends itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from price_keeper.errors import InvalidStoreRequest, StoreMisconfigured
from price_keeper.stores import dynamodb_errors
from price_keeper.stores.schema import TABLES

from tests.support.afflicted import (
    Trial,
    asked,
    by_hand,
    checks,
    dynamodb,
    metric,
    table_made,
    tables_made,
    told,
    tried,
    until,
    used_in_dynamodb,
)
from tests.support.commands import Sidecar
from tests.support.crashing import Lineup, Load
from tests.support.engines import Engines

COUNTERS = "usage-agg-sharded"
WAITS = "spend cannot be flushed, and waits in the journal; the log says why"
MISSING = "a table is missing in DynamoDB; make it with: price-keeper tables create"


def test_one_that_is_missing_and_later_deleted_loses_nothing(engines: Engines, tmp_path: Path) -> None:
    endpoint, prefix = engines.endpoints["ministack"], f"tables-{tmp_path.name}-"
    tables_made(endpoint, prefix, without=COUNTERS)
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    client = dynamodb(endpoint)
    with tried(tmp_path) as trial:
        lineup = trial.lineup(store=store)
        with lineup.serving() as running:
            first = _called_without_table(lineup, running)
            assert len(running.complaints) == running.errors.count(MISSING) == 1
            table_made(client, prefix, TABLES[COUNTERS])
            until(lambda: set(checks(running.control).values()) == {"ok"})
            assert _counted(endpoint, prefix) == _served(trial)
            went = _served(trial)
            client.delete_table(TableName=f"{prefix}{COUNTERS}")
            second = _called_without_table(lineup, running)
            assert len(running.complaints) == running.errors.count(MISSING) == 2
            table_made(client, prefix, TABLES[COUNTERS])
            until(lambda: set(checks(running.control).values()) == {"ok"})
            assert running.stop() == 0
        served = _served(trial)
        assert served[0] == first + second
        assert _counted(endpoint, prefix) == (served[0] - went[0], served[1] - went[1])
    print(f"a table away twice: {first} and {second} calls meanwhile, none failed, none lost")


def _called_without_table(lineup: Lineup, running: Sidecar) -> int:
    """How many were answered."""
    with Load(lineup, 3, random.Random(20261119)) as load:
        until(lambda: len(load.whole) > 20 and checks(running.control)["journal"] == WAITS)
        assert told(running.control, "/ready")[0] == 503
        assert metric(running.control, "store_trouble") == 1
    assert load.broken == 0
    return len(load.whole)


def _served(trial: Trial) -> tuple[int, int]:
    """Requests, and what they cost in pico-dollars."""
    served = trial.served()
    return len(served), sum(counts.pico for counts in by_hand(served).values())


def _counted(endpoint: str, prefix: str) -> tuple[int, int]:
    used = used_in_dynamodb(endpoint, prefix)
    return used["requests"], used["pico"]


def test_one_with_another_key_is_told_and_looked_at_again_when_it_is_right(engines: Engines, tmp_path: Path) -> None:
    endpoint, prefix = engines.endpoints["ministack"], f"key-{tmp_path.name}-"
    tables_made(endpoint, prefix, without="config")
    client = dynamodb(endpoint)
    client.create_table(
        TableName=f"{prefix}config",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    with tried(tmp_path) as trial:
        lineup = trial.lineup(store=store)
        with lineup.serving() as running:
            until(lambda: checks(running.control)["store"] == "the store is not as it should be; the log says why")
            assert "another key than it should; see: price-keeper tables check" in running.errors
            assert asked(lineup, lineup.token())[0] == 200
            client.delete_table(TableName=f"{prefix}config")
            table_made(client, prefix, TABLES["config"])
            until(lambda: set(checks(running.control).values()) == {"ok"})
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
def test_spend_waits_for_a_table_whose_key_is_another(message: str) -> None:
    """A segment that is rejected for good would be left to a person, though the table alone is at fault."""
    reasons = [{"Code": "None"}, {"Code": "ValidationError", "Message": message}]
    single = {"Error": {"Code": "ValidationException", "Message": message}}
    several = {"Error": {"Code": "TransactionCanceledException", "Message": "..."}, "CancellationReasons": reasons}
    for answer, operation in ((single, "PutItem"), (several, "TransactWriteItems")):
        found = dynamodb_errors.translate_error(ClientError(answer, operation))
        assert isinstance(found, StoreMisconfigured)
        assert not isinstance(found, InvalidStoreRequest)
