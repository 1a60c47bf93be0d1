"""A sidecar's wall clock jumps, forwards and back, by an hour and over midnight, or is wrong beside one that is right.

Real processes under libfaketime, whose monotonic clock stays right, as it does where somebody sets a machine's clock.
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
from price_keeper.auth.keys import SigningKey
from price_keeper.auth.tokens import TokenService
from price_keeper.model import Scope
from price_keeper.recording.ulid import read_created_at

from tests.support import wrong_clock
from tests.support.afflicted import (
    asked,
    by_hand,
    checks,
    counted,
    counted_by_day,
    dynamodb,
    metric,
    tables_made,
    told,
    tried,
    until,
    used_in_dynamodb,
)
from tests.support.commands import Sidecar
from tests.support.crashing import APP, ORG, SECRET, Lineup, Load
from tests.support.engines import Engines
from tests.support.simulated import read_ledger
from tests.support.wrong_clock import WrongClock

pytestmark = pytest.mark.skipif(bool(wrong_clock.missing()), reason=wrong_clock.missing())

HOUR = 3600.0
RPM, BURST_SECONDS = 120, 2
LIMITS = {"rpm": RPM, "burst_secs": BURST_SECONDS, "mode": "exact"}  # a write for each call, so nobody holds any
SECONDS = float(os.environ.get("PRICE_KEEPER_AFFLICTED_SECONDS", "2"))
FULL_DAY = 24 * HOUR
CALLS = 5
OK, OUT, GONE = "", "AccessDeniedException", "ExpiredTokenException"


def test_jumps_of_an_hour_lose_and_double_nothing(tmp_path: Path) -> None:
    """Bedrock takes any signature here; what it says of a wrong clock is the next test's."""
    with tried(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.lineup(), WrongClock(tmp_path)
        _of_long_tokens(lineup)
        lineup.environment = clock.environment
        with lineup.serving() as running, Load(lineup, 3, random.Random(20261119)) as load:
            for ahead in (0, HOUR, -HOUR, 0):
                _set(clock, ahead, running)
                so_far = len(load.whole)
                until(lambda so_far=so_far: len(load.whole) > so_far + 10)
                assert set(checks(running.control).values()) == {"ok"}
                assert metric(running.control, "unflushed_seconds") < 5
            load.__exit__()
            assert running.stop() == 0
            assert [line for line in running.errors.splitlines() if "is not registered" not in line] == []
        served = trial.served()
        assert load.broken == 0
        assert set(load.whole) == set(served)
        assert counted(tmp_path / "price-keeper.db") == by_hand(served)
        (left,) = lineup.journal.glob("*.seg")
        assert read_created_at(left.stem) > time.time() + HOUR - 60  # names go on from the latest, so that none sorts wrong
        with lineup.serving() as running:
            assert asked(lineup, lineup.token())[0] == 200
            assert running.stop() == 0
        assert counted(tmp_path / "price-keeper.db") == by_hand(trial.served())
    print(f"4 jumps, {len(load.whole)} calls, none failed, none lost, none twice")


def test_a_clock_that_is_an_hour_off_is_told_with_both_times_and_forgotten_once_it_is_right(tmp_path: Path) -> None:
    """Bedrock takes no signature then, which is nothing that callers could mend by tokens of theirs."""
    with tried(tmp_path) as trial:
        lineup, clock = trial.lineup(), WrongClock(tmp_path, HOUR)
        _of_long_tokens(lineup)
        lineup.environment = clock.environment
        with lineup.serving() as running:
            token = lineup.token()
            assert {asked(lineup, token)[:2] for _ in range(10)} == {(503, "ServiceUnavailableException")}
            until(lambda: "refuses the sidecar's own" in checks(running.control)["bedrock"])
            said = re.findall(
                r"InvalidSignatureException, on (.+ GMT); by our clock it is (.+ GMT)$", running.errors, re.M
            )
            ((theirs, ours),) = (tuple(map(parsedate_to_datetime, each)) for each in said)
            assert abs((ours - theirs).total_seconds() - HOUR) < 60
            clock.set(0)
            until(lambda: asked(lineup, token)[0] == 200)
            assert running.stop() == 0
        assert counted(tmp_path / "price-keeper.db") == by_hand(trial.served())


def test_a_jump_over_midnight_moves_no_call_that_had_begun(tmp_path: Path) -> None:
    before_midnight = FULL_DAY - time.time() % FULL_DAY - HOUR / 2
    today, tomorrow = (
        time.strftime("DAY#%Y%m%d", time.gmtime(time.time() + before_midnight + later)) for later in (0, HOUR)
    )
    with tried(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.lineup(), WrongClock(tmp_path, before_midnight)
        _of_long_tokens(lineup, before_midnight)
        lineup.environment = clock.environment
        with lineup.serving() as running:
            token, slow = lineup.token(), []
            assert asked(lineup, token)[0] == 200
            trial.bedrock.plan(*[{"latency_ms": 2500}] * 3)
            callers = [threading.Thread(target=lambda: slow.append(asked(lineup, token)[0])) for _ in range(3)]
            for each in callers:
                each.start()
            until(lambda: len(read_ledger(trial.ledger)) == 4)
            _set(clock, before_midnight + HOUR, running)
            assert not slow
            assert [asked(lineup, token)[0] for _ in range(5)] == [200] * 5
            for each in callers:
                each.join()
            assert slow == [200] * 3
            _set(clock, before_midnight, running)  # and back: it is the day before once more
            assert [asked(lineup, token)[0] for _ in range(2)] == [200] * 2
            assert running.stop() == 0
    assert counted_by_day(tmp_path / "price-keeper.db") == {today: 1 + 3 + 2, tomorrow: 5}


def test_who_is_out_stays_out_whatever_the_clock_does(tmp_path: Path) -> None:
    """What has expired is good for as long as the clock says so, and no longer."""
    good, revoked, short, over = (_minted(-hours * HOUR, 4 * HOUR) for hours in (2, 2, 3.5, 4.5))
    with tried(tmp_path, "--no-auth") as trial:
        lineup, clock = trial.lineup(), WrongClock(tmp_path)
        lineup.environment = clock.environment
        answers: Counter[str] = Counter()
        with lineup.serving() as running:
            assert asked(lineup, revoked)[0] == 200
            _revoke(running, revoked)
            for ahead, kinds in ((0, (OK, GONE)), (HOUR, (GONE, GONE)), (-HOUR, (OK, OK)), (0, (OK, GONE))):
                _set(clock, ahead, running)
                assert (asked(lineup, short)[1], asked(lineup, over)[1]) == kinds
                answers.update(asked(lineup, revoked)[1] for _ in range(CALLS))
                assert asked(lineup, good)[0] == 200
            assert running.stop() == 0
        clock.set(HOUR)
        with lineup.serving() as running:  # one that has heard of no revocation
            for ahead in (HOUR, 0):
                _set(clock, ahead, running)
                answers.update(asked(lineup, revoked)[1] for _ in range(CALLS))
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
    clock.set(ahead)
    until(lambda: abs(_time_told(running) - time.time() - ahead) < 60)


def _time_told(running: Sidecar) -> float:
    """With every failure of the control port."""
    _, body = told(running.control, "/no/such/route")
    return datetime.fromisoformat(json.loads(body)["timestamp"]).timestamp()


def _of_long_tokens(lineup: Lineup, ahead: float = 0.0) -> None:
    """Good for two hours either way, so that what jumps is the day and not who may call."""
    lineup.token = lambda: _minted(ahead - 2 * HOUR, 4 * HOUR)  # type: ignore[method-assign]


def test_one_wrong_clock_of_two_neither_starves_nor_floods_the_other(engines: Engines, tmp_path: Path) -> None:
    """Limits go by the store's time. By one that is an hour ahead each bucket would be full again at every look."""
    endpoint, prefix = engines.endpoints["ministack"], f"clock-{tmp_path.name}-"
    tables_made(endpoint, prefix)
    settings = {"PK": Scope(ORG).key, "SK": f"APP#{APP}", "limits": LIMITS}
    boto3.resource("dynamodb", endpoint_url=endpoint, region_name="us-east-1").Table(f"{prefix}config").put_item(
        Item=settings
    )
    store = {"engine": "dynamodb", "endpoint": endpoint, "region": "us-east-1", "table_prefix": prefix}
    with tried(tmp_path, "--no-auth") as trial:
        right, wrong = (trial.lineup(name, store=store, aggregator={"interval_secs": 1}) for name in ("right", "wrong"))
        clock = WrongClock(tmp_path, HOUR)
        wrong.environment = clock.environment
        for each in (right, wrong):
            _of_long_tokens(each)
        with right.serving() as one, wrong.serving() as other:
            began = time.monotonic()
            with Load(right, 3, random.Random(1)) as calm, Load(wrong, 3, random.Random(2)) as hasty:
                for ahead in (HOUR, -HOUR):
                    clock.set(ahead)
                    time.sleep(SECONDS)
            took = time.monotonic() - began
            until(lambda: _totals(endpoint, prefix) == len(trial.served()))
            assert (one.stop(), other.stop()) == (0, 0)
        served = trial.served()
    assert len(served) == len(calm.whole) + len(hasty.whole)
    assert used_in_dynamodb(endpoint, prefix)["requests"] == len(served)
    assert len(served) <= RPM / 60 * (BURST_SECONDS + took) + 1
    assert min(calm.broken, hasty.broken) > 0  # by the limit
    assert min(len(calm.whole), len(hasty.whole)) > 0
    print(f"an hour wrong, either way, {took:.1f} s: {len(calm.whole)} and {len(hasty.whole)} of {RPM} calls a minute")


def _totals(endpoint: str, prefix: str) -> int:
    """As whoever asks for them is told, of all labels and days."""
    items = dynamodb(endpoint).scan(TableName=f"{prefix}daily-total")["Items"]
    return sum(int(item["requests"]["N"]) for item in items)
