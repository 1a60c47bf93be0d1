"""SIGHUP: labels and prices reloaded while calls go on, wholly or not at all, by one process and by several."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from bedrock_simulator import Keys
from botocore.exceptions import ClientError

from tests.support.commands import sidecar
from tests.support.reloads import (
    AFTER,
    BEFORE,
    HAIKU,
    RELOADED_MESSAGE,
    Reloader,
    ReloadLoad,
    call_once,
    cost_function,
    label,
    read_recorded_calls,
    send_sighup,
    write_labels,
)
from tests.support.sidecar_crashes import ORG, SECRET, SegmentCopies, SidecarSetup
from tests.support.simulated import CLAUDE, NOVA, BedrockProcess, BotoCaller
from tests.support.workers import children, get, short_socket_folder, wait_until

ROUNDS = 8
CALLERS = 4
WORKERS = 2


@pytest.fixture(autouse=True)
def sockets() -> Iterator[Path]:
    with short_socket_folder() as folder:
        yield folder


both = pytest.mark.parametrize("lineup", [1, WORKERS], indirect=True)


@pytest.fixture
def lineup(request: pytest.FixtureRequest, tmp_path: Path, bedrock: BedrockProcess) -> SidecarSetup:
    workers = getattr(request, "param", 1)
    options = () if workers == 1 else ("--workers", str(workers))
    made = SidecarSetup(tmp_path, bedrock.url, {"path": "price-keeper.db"}, options=options)
    made.write_config()
    write_labels(made, BEFORE)
    return made


def caller_of(lineup: SidecarSetup) -> BotoCaller:
    return BotoCaller(lineup.url, keys=Keys("any", "any", lineup.token()))


@both
def test_reload_under_load_gives_each_call_one_model_and_its_price(lineup: SidecarSetup) -> None:
    copies = lineup.folder / "copies"
    with lineup.run_sidecar() as running, SegmentCopies(lineup.journal, copies):
        with ReloadLoad(lineup, ["moving", "steady"], CALLERS) as load:
            reloader = Reloader(running, lineup)
            for number in range(ROUNDS):
                before = len(load.answered)
                wait_until(lambda before=before: len(load.answered) > before + CALLERS)
                reloader.reload(AFTER if number % 2 == 0 else BEFORE)
        assert running.stop() == 0
        assert "ERROR" not in running.errors
        assert "Traceback" not in running.errors
    assert load.failed == []
    segments = read_recorded_calls(copies)
    models: Counter[str] = Counter()
    for answer in load.answered:
        (once,) = segments[answer.request]
        labels = AFTER if answer.model == HAIKU else BEFORE
        assert (once.label, answer.label) == (answer.requested_label, answer.requested_label)
        assert answer.model == labels[answer.label]["model"]
        assert once.counts.pico == cost_function(labels, answer.label)(once.counts)
        assert "why" not in once.about
        models[answer.model] += 1
    assert set(models) == {CLAUDE, HAIKU, NOVA}


def test_reload_keeps_calls_in_flight_and_yields_to_stop(lineup: SidecarSetup, bedrock: BedrockProcess) -> None:
    copies, ended = lineup.folder / "copies", []
    bedrock.plan(always={"frame_ms": 60, "output_tokens": 40})

    def stream() -> None:
        ended.append(call_once(caller_of(lineup), "moving", "converse_stream"))

    with lineup.run_sidecar() as running, SegmentCopies(lineup.journal, copies):
        threads = [threading.Thread(target=stream) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        wait_until(lambda: open_calls(running.control) == CALLERS)
        Reloader(running, lineup).reload(AFTER)
        assert not ended
        last = threading.Thread(target=stream)
        last.start()
        wait_until(lambda: open_calls(running.control) == CALLERS + 1)
        running.process.send_signal(signal.SIGTERM)
        for _ in range(5):
            send_sighup(running)
            time.sleep(0.02)
        for thread in (*threads, last):
            thread.join()
        assert running.process.wait(30) == 0
        assert "SIGHUP ignored: the process is stopping" in running.errors
        assert "Traceback" not in running.errors
    segments = read_recorded_calls(copies)
    assert Counter(answer.model for answer in ended) == {CLAUDE: CALLERS, HAIKU: 1}
    for answer in ended:
        (once,) = segments[answer.request]
        labels = AFTER if answer.model == HAIKU else BEFORE
        assert once.counts.pico == cost_function(labels, "moving")(once.counts)


def open_calls(control: str) -> float:
    lines = get(f"{control}/metrics")[1].splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("price_keeper_calls_open"))


def is_ready(control: str) -> bool:
    try:
        return get(f"{control}/ready")[0] == 200
    except OSError:  # another process that has the port restarts
        return False


def samples(control: str, name: str) -> list[float]:
    """What all workers say."""
    lines = get(f"{control}/metrics")[1].splitlines()
    return [float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == f"price_keeper_{name}"]


def metric(control: str, name: str) -> set[float]:
    return set(samples(control, name))


@both
def test_reload_with_one_mistake_is_refused_entirely(lineup: SidecarSetup) -> None:
    file, workers = lineup.folder / "config.yaml", WORKERS if lineup.options else 1
    with lineup.run_sidecar() as running:
        caller, reloader = caller_of(lineup), Reloader(running, lineup)
        ready, good = get(f"{running.control}/ready"), file.read_text()
        began = metric(running.control, "configuration_taken_timestamp_seconds")
        wrong = {**AFTER, "added": label("a model/of nobody's", 1, 1)}
        wrong["moving"] = {**wrong["moving"], "prices_usd_per_1m": {"input": -1}}
        write_labels(lineup, wrong, nonsense=1)
        for times in (1, 2):
            send_sighup(running)
            wait_until(lambda times=times: metric(running.control, "reloads_total") >= {times})
        refused = [line for line in running.errors.splitlines() if " ERROR " in line]
        rejected = "SIGHUP: configuration rejected; the previous one stays in force: config.yaml:"
        assert all(rejected in x for x in refused)
        lines = [line.rpartition("config.yaml:")[2].split(": ")[:2] for line in refused]
        keys = {name for _, name in lines}
        wrong_keys = {"nonsense", "labels.moving.prices_usd_per_1m.input", "labels.added.model"}
        assert wrong_keys <= keys
        assert len(lines) == 2 * len(keys)  # each time, and by one process
        text = dict(enumerate(file.read_text().splitlines(), 1))
        assert all(name.split(".")[-1] in text[int(line)] for line, name in lines if name in wrong_keys)
        wait_until(lambda: "the last reload was rejected" in get(f"{running.control}/ready")[1])
        assert get(f"{running.control}/ready")[0] == 200
        assert metric(running.control, "configuration_refused") == {1}
        assert metric(running.control, "configuration_taken_timestamp_seconds") == began
        assert call_once(caller, "moving").model == CLAUDE
        with pytest.raises(ClientError, match="there is no label for 'added'"):
            call_once(caller, "added")
        os.remove(file)
        send_sighup(running)
        wait_until(lambda: "config.yaml: cannot be read: No such file or directory" in running.errors)
        file.write_text(good)
        reloader.reload(AFTER, aggregator={"interval_secs": 59}, defaults={"timezone": "Europe/Berlin"})
        keys = "SIGHUP: these changes need a restart: aggregator.interval_secs, defaults.timezone"
        wait_until(lambda: keys in running.errors)
        assert running.errors.count("need a restart") == 1
        assert call_once(caller, "moving").model == HAIKU
        assert metric(running.control, "configuration_refused") == {0}
        wait_until(lambda: get(f"{running.control}/ready") == ready)
        assert min(metric(running.control, "configuration_taken_timestamp_seconds")) > max(began)
        assert running.errors.count(f"{RELOADED_MESSAGE}: changed: moving (model, prices_usd_per_1m)\n") == workers
        caller.client.close()


@pytest.mark.parametrize("lineup", [WORKERS], indirect=True)
def test_restarted_worker_knows_refused_configuration(lineup: SidecarSetup) -> None:
    with lineup.run_sidecar() as running:
        reloader = Reloader(running, lineup)
        reloader.reload(AFTER)
        write_labels(lineup, AFTER, nonsense=1)
        send_sighup(running)
        wait_until(lambda: metric(running.control, "configuration_refused") == {1})
        os.kill(reloader.workers[0], signal.SIGKILL)
        wait_until(lambda: len(set(children(running.process.pid)) - set(reloader.workers)) == 1)
        wait_until(lambda: is_ready(running.control))
        assert samples(running.control, "configuration_refused") == [1] * WORKERS
        assert "the last reload was rejected" in get(f"{running.control}/ready")[1]
        caller = caller_of(lineup)
        assert {call_once(caller, "moving").model for _ in range(4)} == {HAIKU}
        caller.client.close()


def catches(pid: int) -> bool:
    """Whether a hang-up is heeded or ignored by now, and does not end it."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn"))]
    return any(mask & 1 << signal.SIGHUP - 1 for mask in masks)


@both
def test_early_and_repeated_sighups_end_nothing_and_are_not_lost(lineup: SidecarSetup) -> None:
    is_over, hung_up = threading.Event(), []

    def storm() -> None:
        """On all its processes, as a terminal does it, or `systemctl kill`. The file is another after the first one."""
        wait_until(lambda: len(found_by(lineup.folder)) == 1)
        (pid,) = found_by(lineup.folder)
        wait_until(lambda: catches(pid))
        write_labels(lineup, AFTER)
        while not is_over.wait(0.003):
            for each in (pid, *filter(catches, children(pid))):
                os.kill(each, signal.SIGHUP)
                hung_up.append(each)

    thread = threading.Thread(target=storm)
    thread.start()
    try:
        with lineup.run_sidecar() as running:
            caller = caller_of(lineup)
            wait_until(lambda: {call_once(caller, "moving").model for _ in range(4)} == {HAIKU})
            is_over.set()
            thread.join()
            assert len(hung_up) > 10
            assert len(children(running.process.pid)) == (WORKERS if lineup.options else 0)
            assert metric(running.control, "configuration_refused") == {0}
            assert running.stop() == 0
            assert "Traceback" not in running.errors
            assert "died" not in running.errors
            caller.client.close()
    finally:
        is_over.set()
        thread.join()


def found_by(folder: Path) -> list[int]:
    """The processes that work there and were not started by others of them."""
    parents = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(place / "cwd") == str(folder):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return [pid for pid, parent in parents.items() if parent not in parents]


@pytest.mark.parametrize("lineup", [WORKERS], indirect=True)
def test_worker_started_later_has_reloaded_configuration(lineup: SidecarSetup) -> None:
    with lineup.run_sidecar() as running:
        reloader = Reloader(running, lineup)
        reloader.reload(AFTER)
        (lineup.folder / "config.yaml").write_text("nobody: reads this\n")
        for pid in reloader.workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: running.errors.count("died") == WORKERS)
        os.kill(running.process.pid, signal.SIGHUP)  # while they rest, and refused
        wait_until(lambda: len(children(running.process.pid)) == WORKERS)
        wait_until(lambda: is_ready(running.control))
        caller = caller_of(lineup)
        models = []
        for _ in range(12):  # each on a connection of its own
            models.append(call_once(caller, "moving").model)
            caller.client.close()
            caller = caller_of(lineup)
        assert set(models) == {HAIKU}
        caller.client.close()


def test_control_service_reloads_too(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = SidecarSetup(tmp_path, bedrock.url, {"path": "price-keeper.db"}, options=("--role", "control"))
    lineup.write_config()
    write_labels(lineup, BEFORE)
    put = {"org_name": "Acme", "timezone": "UTC", "quota_scope": "APP", "model_ordering": ["new"], "quotas": {"new": 5}}
    environment = {"PRICE_KEEPER_JWT_SECRET": SECRET, "PRICE_KEEPER_API_KEY": "the key of this test's administrator"}
    with sidecar("serve", *lineup.options, folder=tmp_path, **environment) as running:

        def status() -> int:
            request = urllib.request.Request(f"{running.control}/api/v1/orgs/{ORG}", method="PUT")
            request.data = json.dumps(put).encode()
            request.add_header("X-API-Key", environment["PRICE_KEEPER_API_KEY"])
            request.add_header("Content-Type", "application/json")
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as refused:
                return refused.code

        assert status() == 400
        Reloader(running, lineup).reload({**BEFORE, "new": label(HAIKU, 1, 2)})
        assert status() == 201
        assert running.stop() == 0
