"""`price-keeper serve --workers N`: one data port of several processes, which start, tell, die and end as one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from price_keeper.telemetry.metrics import ALL_METRICS

from tests.support.commands import ROOT, price_keeper, sidecar
from tests.support.ports import free_port
from tests.support.sidecar_crashes import SECRET
from tests.support.simulated import DEFAULT_KEYS, BedrockProcess
from tests.support.workers import (
    WorkerProcesses,
    build_setup,
    children,
    has_exited,
    run_workers,
    short_socket_folder,
    wait_until,
)

WORKERS = 3
CALLS = 60  # fresh connections: that one of three workers gets none of them is one in ten thousand millions
ENVIRONMENT = {
    "PRICE_KEEPER_JWT_SECRET": SECRET,
    "AWS_ACCESS_KEY_ID": DEFAULT_KEYS.access_key,
    "AWS_SECRET_ACCESS_KEY": DEFAULT_KEYS.secret_key,
}


@pytest.fixture
def workers(tmp_path: Path, bedrock: BedrockProcess, sockets: Path) -> Iterator[WorkerProcesses]:
    with run_workers(build_setup(tmp_path, bedrock.url, WORKERS)) as running:
        yield running
    assert "Traceback" not in running.running.errors


@pytest.fixture(autouse=True)
def sockets() -> Iterator[Path]:
    with short_socket_folder() as folder:
        yield folder


def test_all_workers_serve_and_first_reports_for_all(workers: WorkerProcesses) -> None:
    assert len(workers.pids) == WORKERS
    assert {workers.call() for _ in range(CALLS)} == {(200, "premium")}
    recorded = workers.samples("recorded_requests_total")
    assert set(recorded) == {"0", "1", "2"}
    assert all(recorded.values())
    assert sum(recorded.values()) == CALLS
    assert workers.ready() == (
        200,
        {"store": "ok", "journal": "ok", "revocation": "ok", "bedrock": "ok", "worker 1": "ok", "worker 2": "ok"},
    )
    text = workers.metrics()
    assert text.endswith(f"\nprice_keeper_workers_up {WORKERS}\n")
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert sorted(names) == sorted(metric.name for metric in ALL_METRICS)  # each once
    named = [line.split(" ")[2] if line[0] == "#" else family(line) for line in text.splitlines()]
    assert len(set(named)) == sum(before != after for before, after in zip(["", *named], named, strict=False))
    assert text.count("_bucket{worker=") > 0
    assert f"\nprice_keeper_workers {WORKERS}\n" in text
    assert {path.name for path in workers.setup.journal.glob("worker-*")} == {"worker-1", "worker-2"}
    assert (
        workers.setup.journal.stat().st_mode & 0o777,
        (workers.setup.journal / "worker-1").stat().st_mode & 0o777,
    ) == (
        0o700,
        0o700,
    )


def family(line: str) -> str:
    """The metric that a sample belongs to, which may be a part of a histogram."""
    return re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", re.split(r"[{ ]", line)[0])


def test_hanging_worker_makes_service_not_ready(workers: WorkerProcesses) -> None:
    os.kill(workers.pids[1], signal.SIGSTOP)
    wait_until(lambda: workers.ready()[0] == 503)
    assert workers.ready()[1]["worker 1"] == "no answer in 2 seconds"
    text = workers.metrics()
    assert 'worker="1"' not in text
    assert 'worker="2"' in text
    assert text.endswith("\nprice_keeper_workers_up 2\n")
    os.kill(workers.pids[1], signal.SIGCONT)
    wait_until(lambda: workers.ready()[0] == 200)
    assert set(workers.samples("calls_open")) == {"0", "1", "2"}


@pytest.mark.parametrize("number", [0, 1])
def test_dead_worker_is_restarted(workers: WorkerProcesses, number: int) -> None:
    os.kill(workers.pids[number], signal.SIGKILL)
    wait_until(lambda: has_exited(workers.pids[number]))
    wait_until(lambda: len(children(workers.running.process.pid)) == WORKERS)
    wait_until(lambda: _is_ready(workers))
    new = set(children(workers.running.process.pid)) - set(workers.pids)
    assert len(new) == 1
    for _ in range(CALLS):
        assert workers.call()[0] == 200
    assert all(workers.samples("recorded_requests_total").values())
    assert f"worker {number} died (it was killed by signal 9); it is started again in 1 s" in workers.running.errors
    assert workers.running.stop() == 0
    assert not any(not has_exited(pid) for pid in (*workers.pids, *new))


def _is_ready(workers: WorkerProcesses) -> bool:
    try:
        return workers.ready()[0] == 200
    except OSError:  # it may be the one that has the control port
        return False


def test_stop_lets_every_worker_finish_calls(workers: WorkerProcesses, bedrock: BedrockProcess, sockets: Path) -> None:
    (folder,) = sockets.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["worker-1", "worker-2"]
    bedrock.plan(always={"frame_ms": 50, "output_tokens": 500})
    connections = [workers.request("converse-stream") for _ in range(CALLS)]
    answers = [connection.getresponse() for connection in connections]
    assert all(workers.samples("calls_open").values())
    workers.running.process.send_signal(signal.SIGTERM)
    for answer in answers:
        assert answer.status == 200
        assert b"metadata" in answer.read()  # whole
    for connection in connections:
        connection.close()
    assert workers.running.process.wait(30) == 0
    assert all(map(has_exited, workers.pids))
    assert not list(sockets.iterdir())
    assert [line for line in workers.running.errors.splitlines() if "is not registered" not in line] == []


def test_killed_supervisor_leaves_no_worker(workers: WorkerProcesses, sockets: Path) -> None:
    workers.running.process.kill()
    wait_until(lambda: all(map(has_exited, workers.pids)), 30)
    assert not list(sockets.iterdir())
    assert workers.running.errors.count("the supervisor has died; this worker drains and ends") == WORKERS
    assert not any(path.stat().st_size > 200 for path in workers.setup.journal.rglob("*.seg"))


def test_terminal_interrupt_and_hangup_reach_all_workers(workers: WorkerProcesses) -> None:
    workers.running.process.send_signal(signal.SIGHUP)
    message = "SIGHUP: labels and prices reloaded: nothing in them is another"
    wait_until(lambda: workers.running.errors.count(message) == WORKERS)
    for pid in (*workers.pids, workers.running.process.pid):
        os.kill(pid, signal.SIGINT)
    assert workers.running.process.wait(30) == 0
    assert all(map(has_exited, workers.pids))


# What it does not start with.


def _refused(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    refused = price_keeper("serve", *options, folder=folder, **ENVIRONMENT, **environment)
    assert refused.returncode != 0
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    return refused


@pytest.mark.parametrize("sharing", [False, True])
def test_port_in_use_is_reported_in_one_line(tmp_path: Path, sockets: Path, sharing: bool) -> None:
    lineup = build_setup(tmp_path, "http://127.0.0.1:9", WORKERS)
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(sharing))
        holder.bind(("127.0.0.1", lineup.port))
        holder.listen()
        refused = _refused(tmp_path, *lineup.options)
    assert refused.returncode == 1
    message = f"price-keeper: cannot listen on 127.0.0.1:{lineup.port}: Address already in use; "
    assert refused.stderr.startswith(message)
    assert refused.stderr.count("\n") == 1
    assert not list(sockets.iterdir())


def test_start_failure_of_all_workers_is_reported_once(tmp_path: Path, sockets: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    lineup = build_setup(tmp_path, "http://127.0.0.1:9", WORKERS, store={"path": "file/price-keeper.db"})
    refused = _refused(tmp_path, *lineup.options)
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "price-keeper.db" in refused.stderr
    alone = _refused(tmp_path)
    assert (alone.returncode, alone.stderr) == (refused.returncode, refused.stderr)
    assert not list(sockets.iterdir())


def test_start_failure_of_one_worker_stops_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        lineup = build_setup(tmp_path, "http://127.0.0.1:9", WORKERS)
        refused = _refused(tmp_path, *lineup.options, PRICE_KEEPER__LISTEN__CONTROL=f"127.0.0.1:{port}")
    assert refused.stderr == f"price-keeper: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    with socket.socket() as again:  # no process has the data port any longer
        again.bind(("127.0.0.1", lineup.port))


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        (("--workers", "0"), {}, "a number from 1 to 64, not 0"),
        (("--workers", "65"), {}, "a number from 1 to 64, not 65"),
        (("--workers", "two"), {}, "a number from 1 to 64, not two"),
        (("--workers", "2", "--role", "control"), {}, "--workers: they share a data port"),
        (("--workers", "2"), {"PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}, "would simulate a Bedrock of its own"),
        (("--workers", "2"), {"PRICE_KEEPER_JWT_SECRET": ""}, "PRICE_KEEPER_JWT_SECRET"),
    ],
)
def test_impossible_worker_options_are_reported(
    tmp_path: Path, options: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    build_setup(tmp_path, "http://127.0.0.1:9", 1)
    refused = price_keeper("serve", *options, folder=tmp_path, **(ENVIRONMENT | environment))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr


def test_free_port_is_shared_by_workers_and_health_is_separate(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup, port = build_setup(tmp_path, bedrock.url, 2), free_port()
    free = {"PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0", "PRICE_KEEPER__LISTEN__HEALTH": f"127.0.0.1:{port}"}
    with sidecar("serve", *lineup.options, folder=tmp_path, **ENVIRONMENT, **free) as running:
        workers = WorkerProcesses(lineup, running, lineup.token())
        assert [workers.call()[0] for _ in range(CALLS)] == [200] * CALLS
        assert all(workers.samples("recorded_requests_total").values())
        assert not running.data.endswith((":0", f":{lineup.port}"))
        assert running.stop() == 0


def test_sidecar_without_signing_keys_runs_workers(tmp_path: Path, bedrock: BedrockProcess) -> None:
    lineup = build_setup(tmp_path, bedrock.url, 2)
    lineup.options += ("--role", "sidecar")
    with run_workers(lineup) as workers:
        assert workers.call()[0] == 200
        assert workers.ready()[0] == 200
        assert workers.running.stop() == 0


def test_default_configuration_allows_workers() -> None:
    assert "--workers" in price_keeper("serve", "--help", folder=ROOT).stdout
