"""Names that do not resolve, or whose resolver says nothing: of Bedrock and of the store, at the start and later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import names
from tests.support.afflicted import Trial, asked, checks, tables_made, tried, until, used_in_dynamodb
from tests.support.commands import Sidecar
from tests.support.crashing import Lineup
from tests.support.engines import Engines
from tests.support.names import Names

BEDROCK, STORE = "bedrock.test", "store.test"
AWAY = (503, "ServiceUnavailableException", "Bedrock cannot be reached")
CALLERS = 40

pytestmark = pytest.mark.skipif(bool(names.missing()), reason=names.missing())


@contextmanager
def resolved(folder: Path, engines: Engines) -> Iterator[tuple[Trial, Lineup, Names]]:
    """A sidecar that has to look up both, by a resolver that knows neither yet."""
    endpoint, prefix = engines.endpoints["ministack"], f"names-{folder.name}-"
    tables_made(endpoint, prefix)
    store = {"engine": "dynamodb", "endpoint": _by_name(endpoint, STORE), "region": "us-east-1", "table_prefix": prefix}
    store["allow_insecure"] = True
    with Names(folder) as asking, tried(folder) as trial:
        lineup = trial.lineup(
            store=store, upstream={"endpoint": _by_name(trial.bedrock.url, BEDROCK), "allow_insecure": True}
        )
        lineup.around = asking.around
        yield trial, lineup, asking
        assert used_in_dynamodb(endpoint, prefix)["requests"] == len(trial.served())


def _by_name(url: str, name: str) -> str:
    return f"http://{name}:{urlsplit(url).port}"


def test_it_says_so_keeps_the_store_apart_from_bedrock_and_goes_on_by_itself(engines: Engines, tmp_path: Path) -> None:
    with resolved(tmp_path, engines) as (_, lineup, asking), lineup.serving() as running:
        token = lineup.token()
        until(lambda: asked(lineup, token) == AWAY)  # neither is known
        until(lambda: checks(running.control)["bedrock"] == "Bedrock cannot be reached; the log says why")
        assert checks(running.control)["store"] == "the store is away; the log says why"
        assert "Name or service not known" in running.errors
        _while_bedrocks_resolver_is_silent(lineup, running, asking)
        asking.silent.clear()
        until(lambda: asked(lineup, token)[0] == 200)
        until(lambda: set(checks(running.control).values()) == {"ok"})
        assert "Future exception" not in running.errors
        assert running.stop() == 0
    print(
        f"{CALLERS} calls while a resolver was silent; {asking.asked.count(BEDROCK)} questions to it of Bedrock in all"
    )


def _while_bedrocks_resolver_is_silent(lineup: Lineup, running: Sidecar, asking: Names) -> None:
    """The store is found all the same: four calls would fill the threads in which the event loop looks up names."""
    token, answers, so_far = lineup.token(), [], asking.asked.count(BEDROCK)
    asking.silent |= {BEDROCK}

    def call() -> None:
        answers.append(asked(lineup, token, seconds=60))

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for each in callers:
        each.start()
    until(lambda: asking.asked.count(BEDROCK) > so_far)
    asking.known |= {BEDROCK, STORE}
    until(lambda: checks(running.control)["store"] == "ok", seconds=8)
    for each in callers:
        each.join()
    assert answers == [AWAY] * CALLERS
