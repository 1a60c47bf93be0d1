"""What several workers make of a configuration, of each other's samples, and of a death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from price_keeper.app import StopSignal
from price_keeper.cli.serve_command import MAX_SOCKET_FOLDER_LENGTH, _create_socket_folder, serve_with_workers
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.control.api_types import AccessLevel, ApiRequest, ApiResponse, ApiRoute
from price_keeper.control.control_server import ControlDispatcher, open_control_socket
from price_keeper.errors import ConfigError, ListenFailed, PriceKeeperError, WorkerUnavailable
from price_keeper.server.server_limits import DEFAULT_LIMITS, MemoryLimits, ServerLimits, fit_to_memory
from price_keeper.server.sockets import reserve_port
from price_keeper.telemetry.metrics import CALLS_OPEN, MetricsRegistry
from price_keeper.workers import supervisor
from price_keeper.workers.supervisor import HEALTHY_SECONDS, MAX_RESTART_SECONDS, WorkerProcess
from price_keeper.workers.worker_group import build_telemetry, merge_samples, open_worker_group
from price_keeper.workers.worker_slot import SINGLE_WORKER, WorkerSlot


def test_shared_limits_are_divided_by_workers() -> None:
    config = Config(labels=Config.development().labels)
    config = replace(config, journal=replace(config.journal, dir="j", max_unflushed_usd=Decimal(100)))
    found = [WorkerSlot(number, 8).localize_config(config).journal for number in range(8)]
    assert [each.dir for each in found] == ["j", *(f"j/worker-{number}" for number in range(1, 8))]
    assert {each.max_unflushed_usd for each in found} == {Decimal("12.5")}
    assert SINGLE_WORKER.localize_config(config) == config
    assert list(WorkerSlot(0, 3).other_numbers) == [1, 2]
    assert list(WorkerSlot(1, 3).other_numbers) == list(SINGLE_WORKER.other_numbers) == []


def test_request_memory_is_divided_but_fits_one_request() -> None:
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits()) == DEFAULT_LIMITS
    assert fit_to_memory(DEFAULT_LIMITS, MemoryLimits(), 4) == replace(
        DEFAULT_LIMITS, requests_bytes=DEFAULT_LIMITS.requests_bytes // 4
    )
    assert (
        fit_to_memory(DEFAULT_LIMITS, MemoryLimits(), 64).requests_bytes
        == DEFAULT_LIMITS.head_bytes + DEFAULT_LIMITS.body_bytes
    )
    assert (
        fit_to_memory(ServerLimits(requests_bytes=1000), MemoryLimits(), 64).requests_bytes == 1000
    )  # never more than there was


FIRST = """\
# HELP a_total things, some {odd} "ones"
# TYPE a_total counter
a_total{kind="x y"} 1
a_total{kind="}"} 2
# HELP b now
# TYPE b gauge
b 3
"""


def test_merged_metrics_have_samples_of_all_workers() -> None:
    second = "# HELP c new\n# TYPE c gauge\nc 9\n" + FIRST.replace(" 3\n", " 4\n")
    assert merge_samples({0: FIRST, 12: second}).splitlines() == [
        '# HELP a_total things, some {odd} "ones"',
        "# TYPE a_total counter",
        'a_total{worker="0",kind="x y"} 1',
        'a_total{worker="0",kind="}"} 2',
        'a_total{worker="12",kind="x y"} 1',
        'a_total{worker="12",kind="}"} 2',
        "# HELP b now",
        "# TYPE b gauge",
        'b{worker="0"} 3',
        'b{worker="12"} 4',
        "# HELP c new",
        "# TYPE c gauge",
        'c{worker="12"} 9',
    ]
    assert merge_samples({0: ""}) == ""


def test_restart_backoff_of_crashing_worker_grows() -> None:
    worker, now = WorkerProcess(1), 1000.0
    rests = []
    for _ in range(7):
        worker.mark_started(1, -1, now)
        now += 0.5
        rests.append(worker.schedule_restart(now))
        assert worker.restart_at == now + rests[-1]
    assert rests == [1, 2, 4, 8, 16, 30, MAX_RESTART_SECONDS]
    worker.mark_started(1, -1, now)
    assert worker.schedule_restart(now + HEALTHY_SECONDS) == 1
    worker.mark_started(1, -1, now)
    assert worker.schedule_restart(now + 1) == 2


@pytest.mark.parametrize("failure", [ConfigError(["a: x", "b: y"]), PriceKeeperError("it\nis"), OSError(5, "broken")])
def test_failure_report_round_trips_through_pipe(tmp_path: Path, failure: PriceKeeperError | OSError) -> None:
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
    read, write = os.pipe()
    os.set_blocking(read, False)
    worker = WorkerProcess(1)
    worker.mark_started(1, read, 0)
    assert not worker.read_pipe()
    line = supervisor.ReportPipe(write)
    assert line.send(supervisor.build_failure_report(failure))
    assert worker.read_pipe()
    os.dup2(other, write)  # the number may be another file's by now
    assert not line.send(supervisor.build_failure_report(failure))
    assert (tmp_path / "other").read_bytes() == b""
    os.close(write)
    os.close(other)
    os.close(read)
    assert worker.report is not None
    found = supervisor.parse_failure(worker.report)
    assert str(found) == str(failure)
    assert isinstance(found, ConfigError) == isinstance(failure, ConfigError)
    assert supervisor.parse_failure(supervisor.build_start_report({})) is None


def test_report_in_pieces_or_missing_is_handled() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    worker = WorkerProcess(1)
    worker.mark_started(1, read, 0)
    for piece in (b'{"started"', b": {}"):
        os.write(write, piece)
        assert not worker.read_pipe()
    os.close(write)
    assert worker.read_pipe()  # the worker has died in the middle
    assert (worker.report, worker.is_up) == (None, False)
    os.close(read)


def test_reserved_port_is_shared_and_not_listening() -> None:
    (first,) = reserve_port("127.0.0.1", 0)
    port = first.getsockname()[1]
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1)
        with socket.socket() as ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            ours.bind(("127.0.0.1", port))
            ours.listen()
            with pytest.raises(ListenFailed, match="Address already in use"):
                reserve_port("127.0.0.1", port)
    finally:
        first.close()


async def test_closed_lifeline_stops_like_a_signal() -> None:
    read, write = os.pipe()
    with _signals_as_they_were():
        stop = StopSignal(read)
        waiting = asyncio.create_task(stop.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        os.close(write)
        await asyncio.wait_for(waiting, 10)
    os.close(read)


async def test_signal_after_failed_start_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    with _signals_as_they_were():
        stop = StopSignal()
        with pytest.raises(LookupError):
            async with stop.interrupt_startup():
                raise LookupError
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(stop._requested.wait(), 10)
    assert caplog.text == ""


@contextmanager
def _signals_as_they_were() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)


# The first worker asks the others.


def _other(text: str, status: int = 200, checks: object = None) -> ControlDispatcher:
    async def metrics(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse(text.encode(), content_type="text/plain")

    async def ready(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse({"checks": checks}, status)

    def route(path: str, handle: object) -> ApiRoute:
        return ApiRoute("GET", path, AccessLevel.PUBLIC, path, "", handle, {200: ""}, group="probes")  # type: ignore[arg-type]

    return ControlDispatcher([route("/metrics", metrics), route("/ready", ready)], lambda: 0.0)


@pytest.mark.parametrize(
    ("status", "checks", "expected"),
    [
        (200, {"store": "ok"}, "ok"),
        (200, {"store": "ok", "revocation": "the store has not said"}, "revocation: the store has not said"),
        (503, {"store": "the store is away", "journal": "ok"}, "!store: the store is away"),
        (503, {}, "!not ready"),
        (200, None, "!its response is malformed"),
    ],
)
async def test_readiness_of_other_workers_is_reported(
    tmp_path: Path, status: int, checks: object, expected: str
) -> None:
    place = WorkerSlot(0, 3, tmp_path)
    async with (
        open_control_socket(_other("", status, checks), place.socket_path(1), SystemClock()),
        open_worker_group(place) as workers,
    ):
        asked = workers.build_checks()
        assert list(asked) == ["worker 1", "worker 2"]
        with pytest.raises(WorkerUnavailable, match="its socket does not respond"):
            await asked["worker 2"]()
        if expected.startswith("!"):
            with pytest.raises(WorkerUnavailable, match=expected[1:]):
                await asked["worker 1"]()
        else:
            assert await asked["worker 1"]() == expected


async def test_unreachable_worker_is_missing_from_metrics(tmp_path: Path) -> None:
    place, own = (
        WorkerSlot(0, 3, tmp_path),
        "# HELP price_keeper_calls_open now\n# TYPE price_keeper_calls_open gauge\n",
    )
    path = place.socket_path(1)
    path.write_text("of one that was killed")
    async with (
        open_control_socket(_other(f"{own}price_keeper_calls_open 5\n"), path, SystemClock()),
        open_worker_group(place) as workers,
    ):
        telemetry = build_telemetry(place, workers)
        telemetry.add(CALLS_OPEN, lambda: 4)
        build, *samples = [line for line in (await telemetry.scrape()).splitlines() if not line.startswith("#")]
        assert build.startswith('price_keeper_build_info{worker="0",')
        assert samples == [
            'price_keeper_calls_open{worker="0"} 4',
            'price_keeper_calls_open{worker="1"} 5',
            "price_keeper_workers 3",
            "price_keeper_workers_up 2",
        ]
    assert not path.exists()


async def test_worker_with_failing_metrics_is_not_up(tmp_path: Path) -> None:
    """What it says of its failure is no sample."""
    place = WorkerSlot(0, 2, tmp_path)

    async def fails(_: object, __: ApiRequest) -> ApiResponse:
        return ApiResponse(b"sorry", 500, content_type="text/plain")

    route = ApiRoute("GET", "/metrics", AccessLevel.PUBLIC, "/metrics", "", fails, {200: ""}, group="probes")
    async with (
        open_control_socket(ControlDispatcher([route], lambda: 0.0), place.socket_path(1), SystemClock()),
        open_worker_group(place) as workers,
    ):
        assert (await build_telemetry(place, workers).scrape()).splitlines()[-1] == "price_keeper_workers_up 1"


async def test_single_process_metrics_are_unchanged() -> None:
    async with open_worker_group(SINGLE_WORKER) as workers:
        telemetry = build_telemetry(SINGLE_WORKER, workers)
        assert type(telemetry) is MetricsRegistry
        assert (await telemetry.scrape()).splitlines()[-1] == "price_keeper_workers_up 1"
        assert workers.build_checks() == {}


async def test_missing_socket_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ListenFailed, match=r"^cannot listen on .*/none/worker-1: No such file or directory$"):
        async with open_control_socket(_other(""), tmp_path / "none" / "worker-1", SystemClock()):
            pass


def test_socket_folder_is_private_and_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_FOLDER_LENGTH)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with _create_socket_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) <= MAX_SOCKET_FOLDER_LENGTH
        (folder / "worker-1").write_text("left behind")
        assert not list(long.iterdir())
    assert not folder.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(PriceKeeperError, match="name a folder that can be written to in TMPDIR"),
        _create_socket_folder(),
    ):
        pass


@pytest.mark.parametrize(("owner", "name"), [(os, "fork"), (socket, "SO_REUSEPORT")])
def test_unsupported_system_is_reported(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(PriceKeeperError, match="this system has no fork, or no SO_REUSEPORT"):
        serve_with_workers(Config(labels=Config.development().labels), Path(), {}, lambda *_: None, "both", 2)
