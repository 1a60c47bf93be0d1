"""Names that do not resolve, or whose resolver says nothing: of Bedrock and of the store, at the start and later."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support import name_server
from tests.support.commands import Sidecar
from tests.support.engines import Engines
from tests.support.name_server import NameServer
from tests.support.sidecar_crashes import SidecarSetup
from tests.support.sidecar_trials import (
    FaultTrial,
    call_once,
    create_tables,
    read_dynamodb_usage,
    read_readiness,
    run_trial,
    wait_until,
)

BEDROCK, STORE = "bedrock.test", "store.test"
AWAY = (503, "ServiceUnavailableException", "Bedrock cannot be reached")
CALLERS = 40

pytestmark = pytest.mark.skipif(bool(name_server.why_unavailable()), reason=name_server.why_unavailable())


@contextmanager
def resolved(folder: Path, engines: Engines) -> Iterator[tuple[FaultTrial, SidecarSetup, NameServer]]:
    """A sidecar that has to look up both, by a resolver that knows neither yet."""
    endpoint, prefix = engines.endpoints["ministack"], f"names-{folder.name}-"
    create_tables(endpoint, prefix)
    store = {"engine": "dynamodb", "endpoint": _by_name(endpoint, STORE), "region": "us-east-1", "table_prefix": prefix}
    store["allow_insecure"] = True
    with NameServer(folder) as asking, run_trial(folder) as trial:
        lineup = trial.add_sidecar(
            store=store, upstream={"endpoint": _by_name(trial.bedrock.url, BEDROCK), "allow_insecure": True}
        )
        lineup.wrapper_command = asking.wrapper_command
        yield trial, lineup, asking
        assert read_dynamodb_usage(endpoint, prefix)["requests"] == len(trial.read_used_requests())


def _by_name(url: str, name: str) -> str:
    return f"http://{name}:{urlsplit(url).port}"


def test_unresolvable_names_are_reported_per_service_and_recover(engines: Engines, tmp_path: Path) -> None:
    with resolved(tmp_path, engines) as (_, lineup, asking), lineup.run_sidecar() as running:
        token = lineup.token()
        wait_until(lambda: call_once(lineup, token) == AWAY)  # neither is known
        wait_until(lambda: read_readiness(running.control)["bedrock"] == "Bedrock cannot be reached; the log says why")
        assert read_readiness(running.control)["store"] == "the store is away; the log says why"
        assert "Name or service not known" in running.errors
        _while_bedrocks_resolver_is_silent(lineup, running, asking)
        asking.is_silent.clear()
        wait_until(lambda: call_once(lineup, token)[0] == 200)
        wait_until(lambda: set(read_readiness(running.control).values()) == {"ok"})
        assert "Future exception" not in running.errors
        assert running.stop() == 0
    print(
        f"{CALLERS} calls while a resolver was silent; "
        f"{asking.queries.count(BEDROCK)} questions to it of Bedrock in all"
    )


def _while_bedrocks_resolver_is_silent(lineup: SidecarSetup, running: Sidecar, asking: NameServer) -> None:
    """The store is found all the same: four calls would fill the threads in which the event loop looks up names."""
    token, answers, so_far = lineup.token(), [], asking.queries.count(BEDROCK)
    asking.is_silent |= {BEDROCK}

    def call() -> None:
        answers.append(call_once(lineup, token, seconds=60))

    callers = [threading.Thread(target=call) for _ in range(CALLERS)]
    for each in callers:
        each.start()
    wait_until(lambda: asking.queries.count(BEDROCK) > so_far)
    asking.known_names |= {BEDROCK, STORE}
    wait_until(lambda: read_readiness(running.control)["store"] == "ok", seconds=8)
    for each in callers:
        each.join()
    assert answers == [AWAY] * CALLERS
