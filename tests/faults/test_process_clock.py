"""A sidecar's wall clock jumps, forwards and back, by an hour and over midnight, or is wrong beside one that is right.

Real processes under libfaketime, whose monotonic clock stays right, as it does when a machine's clock is set.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
import urllib.request
from collections import Counter
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import boto3
import pytest
from price_keeper.auth.signing_keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.domain import Scope
from price_keeper.ledger.ulid import read_created_at

from tests.support import wrong_clock
from tests.support.commands import Sidecar
from tests.support.engines import Engines
from tests.support.sidecar_crashes import APP, ORG, SECRET, CrashLoad, SidecarSetup
from tests.support.sidecar_trials import (
    call_once,
    create_tables,
    dynamodb,
    fetch,
    price_by_hand,
    read_counts_by_label,
    read_dynamodb_usage,
    read_metric,
    read_readiness,
    read_requests_by_day,
    run_trial,
    wait_until,
)
from tests.support.simulated import read_ledger
from tests.support.wrong_clock import WrongClock

pytestmark = pytest.mark.skipif(bool(wrong_clock.why_unavailable()), reason=wrong_clock.why_unavailable())

HOUR = 3600.0
RPM, BURST_SECONDS = 120, 2
LIMITS = {"rpm": RPM, "burst_secs": BURST_SECONDS, "mode": "exact"}  # a write for each call, so no leases are held
SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "2"))
FULL_DAY = 24 * HOUR
CALLS = 5
OK, OUT, GONE = "", "AccessDeniedException", "ExpiredTokenException"


def test_clock_jumps_of_an_hour_lose_and_double_nothing(tmp_path: Path) -> None:
    """Bedrock takes any signature here; what it says of a wrong clock is the next test's."""
    with run_trial(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.add_sidecar(), WrongClock(tmp_path)
        _of_long_tokens(lineup)
        lineup.environment = clock.environment
        with lineup.run_sidecar() as running, CrashLoad(lineup, 3, random.Random(20261119)) as load:
            for ahead in (0, HOUR, -HOUR, 0):
                _set(clock, ahead, running)
                so_far = len(load.complete_requests)
                wait_until(lambda so_far=so_far: len(load.complete_requests) > so_far + 10)
                assert set(read_readiness(running.control).values()) == {"ok"}
                assert read_metric(running.control, "unflushed_seconds") < 5
            load.__exit__()
            assert running.stop() == 0
            assert [line for line in running.errors.splitlines() if "is not registered" not in line] == []
        served = trial.read_used_requests()
        assert load.failed_calls == 0
        assert set(load.complete_requests) == set(served)
        assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(served)
        (left,) = lineup.journal.glob("*.seg")
        assert (
            read_created_at(left.stem) > time.time() + HOUR - 60
        )  # names go on from the latest, so that none sorts wrong
        with lineup.run_sidecar() as running:
            assert call_once(lineup, lineup.token())[0] == 200
            assert running.stop() == 0
        assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(trial.read_used_requests())
    print(f"4 jumps, {len(load.complete_requests)} calls, none failed, none lost, none twice")


def test_wrong_clock_is_reported_with_both_times_until_corrected(tmp_path: Path) -> None:
    """Bedrock accepts no signature then, which callers could not fix with other tokens."""
    with run_trial(tmp_path) as trial:
        lineup, clock = trial.add_sidecar(), WrongClock(tmp_path, HOUR)
        _of_long_tokens(lineup)
        lineup.environment = clock.environment
        with lineup.run_sidecar() as running:
            token = lineup.token()
            assert {call_once(lineup, token)[:2] for _ in range(10)} == {(503, "ServiceUnavailableException")}
            wait_until(lambda: "refuses the sidecar's own" in read_readiness(running.control)["bedrock"])
            said = re.findall(
                r"InvalidSignatureException, on (.+ GMT); by our clock it is (.+ GMT)$", running.errors, re.M
            )
            ((theirs, ours),) = (tuple(map(parsedate_to_datetime, each)) for each in said)
            assert abs((ours - theirs).total_seconds() - HOUR) < 60
            clock.set_ahead(0)
            wait_until(lambda: call_once(lineup, token)[0] == 200)
            assert running.stop() == 0
        assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(trial.read_used_requests())


def test_jump_over_midnight_moves_no_call_in_flight(tmp_path: Path) -> None:
    before_midnight = FULL_DAY - time.time() % FULL_DAY - HOUR / 2
    today, tomorrow = (
        time.strftime("DAY#%Y%m%d", time.gmtime(time.time() + before_midnight + later)) for later in (0, HOUR)
    )
    with run_trial(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.add_sidecar(), WrongClock(tmp_path, before_midnight)
        _of_long_tokens(lineup, before_midnight)
        lineup.environment = clock.environment
        with lineup.run_sidecar() as running:
            token, slow = lineup.token(), []
            assert call_once(lineup, token)[0] == 200
            trial.bedrock.plan(*[{"latency_ms": 2500}] * 3)
            callers = [threading.Thread(target=lambda: slow.append(call_once(lineup, token)[0])) for _ in range(3)]
            for each in callers:
                each.start()
            wait_until(lambda: len(read_ledger(trial.ledger)) == 4)
            _set(clock, before_midnight + HOUR, running)
            assert not slow
            assert [call_once(lineup, token)[0] for _ in range(5)] == [200] * 5
            for each in callers:
                each.join()
            assert slow == [200] * 3
            _set(clock, before_midnight, running)  # and back: it is the day before once more
            assert [call_once(lineup, token)[0] for _ in range(2)] == [200] * 2
            assert running.stop() == 0
    assert read_requests_by_day(tmp_path / "price-keeper.db") == {today: 1 + 3 + 2, tomorrow: 5}


def test_clock_jumps_keep_revoked_and_expired_tokens_out(tmp_path: Path) -> None:
    """What has expired is good for as long as the clock says so, and no longer."""
    good, revoked, short, over = (_minted(-hours * HOUR, 4 * HOUR) for hours in (2, 2, 3.5, 4.5))
    with run_trial(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.add_sidecar(), WrongClock(tmp_path)
        lineup.environment = clock.environment
        answers: Counter[str] = Counter()
        with lineup.run_sidecar() as running:
            assert call_once(lineup, revoked)[0] == 200
            _revoke(running, revoked)
            for ahead, kinds in ((0, (OK, GONE)), (HOUR, (GONE, GONE)), (-HOUR, (OK, OK)), (0, (OK, GONE))):
                _set(clock, ahead, running)
                assert (call_once(lineup, short)[1], call_once(lineup, over)[1]) == kinds
                answers.update(call_once(lineup, revoked)[1] for _ in range(CALLS))
                assert call_once(lineup, good)[0] == 200
            assert running.stop() == 0
        clock.set_ahead(HOUR)
        with lineup.run_sidecar() as running:  # one that has heard of no revocation
            for ahead in (HOUR, 0):
                _set(clock, ahead, running)
                answers.update(call_once(lineup, revoked)[1] for _ in range(CALLS))
            assert running.stop() == 0
    assert answers == {OUT: 6 * CALLS}


def _minted(begun: float, seconds: float) -> str:
    tokens = TokenService([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", lambda: time.time() + begun)
    return tokens.mint_access(ORG, APP, int(seconds)).token


def _revoke(running: Sidecar, token: str) -> None:
    headers = {"Content-Type": "application/json"}
    body = json.dumps({"token": token}).encode()
    request = urllib.request.Request(f"{running.control}/auth/revoke", body, headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def _set(clock: WrongClock, ahead: float, running: Sidecar) -> None:
    """Until the process goes by it."""
    clock.set_ahead(ahead)
    wait_until(lambda: abs(_reported_time(running) - time.time() - ahead) < 60)


def _reported_time(running: Sidecar) -> float:
    """With every failure of the control port."""
    _, body = fetch(running.control, "/no/such/route")
    return datetime.fromisoformat(json.loads(body)["timestamp"]).timestamp()


def _of_long_tokens(lineup: SidecarSetup, ahead: float = 0.0) -> None:
    """Good for two hours either way, so that what jumps is the day and not who may call."""
    lineup.token = lambda: _minted(ahead - 2 * HOUR, 4 * HOUR)  # type: ignore[method-assign]


def test_wrong_clock_of_one_sidecar_neither_starves_nor_floods_other(engines: Engines, tmp_path: Path) -> None:
    """Limits go by the store's time. By one that is an hour ahead each bucket would be full again at every look."""
    endpoint, prefix = engines.endpoints["ministack"], f"clock-{tmp_path.name}-"
    create_tables(endpoint, prefix)
    settings = {"PK": Scope(ORG).key, "SK": f"APP#{APP}", "limits": LIMITS}
    boto3.resource("dynamodb", endpoint_url=endpoint, region_name="us-east-1").Table(f"{prefix}config").put_item(
        Item=settings
    )
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    with run_trial(tmp_path, "--no-auth") as trial:
        right, wrong = (
            trial.add_sidecar(name, store=store, aggregator={"interval_secs": 1}) for name in ("right", "wrong")
        )
        clock = WrongClock(tmp_path, HOUR)
        wrong.environment = clock.environment
        for each in (right, wrong):
            _of_long_tokens(each)
        with right.run_sidecar() as one, wrong.run_sidecar() as other:
            began = time.monotonic()
            with CrashLoad(right, 3, random.Random(1)) as calm, CrashLoad(wrong, 3, random.Random(2)) as hasty:
                for ahead in (HOUR, -HOUR):
                    clock.set_ahead(ahead)
                    time.sleep(SECONDS)
            took = time.monotonic() - began
            wait_until(lambda: _totals(endpoint, prefix) == len(trial.read_used_requests()))
            assert (one.stop(), other.stop()) == (0, 0)
        served = trial.read_used_requests()
    assert len(served) == len(calm.complete_requests) + len(hasty.complete_requests)
    assert read_dynamodb_usage(endpoint, prefix)["requests"] == len(served)
    assert len(served) <= RPM / 60 * (BURST_SECONDS + took) + 1
    assert min(calm.failed_calls, hasty.failed_calls) > 0  # by the limit
    assert min(len(calm.complete_requests), len(hasty.complete_requests)) > 0
    print(
        f"an hour wrong, either way, {took:.1f} s: {len(calm.complete_requests)} "
        f"and {len(hasty.complete_requests)} of {RPM} calls a minute"
    )


def _totals(endpoint: str, prefix: str) -> int:
    """As in the report for all labels and days."""
    items = dynamodb(endpoint).scan(TableName=f"{prefix}daily-total")["Items"]
    return sum(int(item["requests"]["N"]) for item in items)
