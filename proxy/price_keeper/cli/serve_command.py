"""`price-keeper serve`: run the sidecar or the control service, in one process or with several workers.

With `--workers N` everything that the workers share is created before the first fork: reserved ports, preloaded
modules, the directory for sockets between them, and the configuration handover.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import uvloop

from price_keeper import app, data_port_wiring
from price_keeper.cli.config_handover import ConfigHandover
from price_keeper.cli.store_selection import load_config_at
from price_keeper.config import Address, Config, load_config
from price_keeper.config.config_changes import apply_reloadable
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.server.server_limits import release_large_blocks
from price_keeper.server.sockets import reserve_port
from price_keeper.telemetry import logs
from price_keeper.telemetry.build_info import describe_build
from price_keeper.workers import reload_signal
from price_keeper.workers.supervisor import ReportStarted, Supervisor
from price_keeper.workers.worker_slot import WorkerSlot


def run_serve(args: Namespace) -> int:
    config, reload_config = load_config_at(args.config), partial(load_config, args.config, os.environ)
    disable_core_dumps()
    release_large_blocks()
    logs.configure_logging(config.telemetry.logs, config.telemetry.log_level)
    scheme = "http" if config.listen.tls is None else "https"
    print_addresses = _create_json_printer(scheme) if args.json else _create_text_printer(args.role, scheme)
    if args.workers > 1:
        return serve_with_workers(config, args.config, os.environ, print_addresses, args.role, args.workers)

    async def on_started(started: app.StartedServer) -> None:
        print_addresses(
            None if started.data_address is None else str(started.data_address), str(started.control_address)
        )

    run_until_stopped(config, os.environ, on_started, args.role, reload_config)
    return 0


def _create_text_printer(role: app.Role, scheme: str) -> Callable[[str | None, str], None]:
    def print_addresses(data_address: str | None, control_address: str) -> None:
        print(f"Bedrock Price Keeper {describe_build()}")
        if data_address is not None:
            print(f"Bedrock Price Keeper listens on {scheme}://{data_address}")
        if role == "control":
            print(f"Bedrock Price Keeper, control service: http://{control_address}/openapi.json")
        print(f"health and readiness: http://{control_address}/ready", flush=True)

    return print_addresses


def _create_json_printer(scheme: str) -> Callable[[str | None, str], None]:
    """Prints the addresses as one line of JSON when the process is ready."""

    def print_addresses(data_address: str | None, control_address: str) -> None:
        addresses = {
            "data": None if data_address is None else f"{scheme}://{data_address}",
            "control": f"http://{control_address}",
        }
        print(json.dumps(addresses), flush=True)

    return print_addresses


def disable_core_dumps() -> None:
    """A process's memory holds prompts, tokens and AWS credentials, and a crash must not write them to a disk."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_until_stopped(
    config: Config,
    environ: Mapping[str, str],
    on_started: app.OnStarted,
    role: app.Role = "both",
    reload_config: Callable[[], Config] | None = None,
) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.run(config, environ, on_started, role=role, read_config=reload_config))
    finally:
        reload_signal.ignore_reload_signals()


MAX_SOCKET_FOLDER_LENGTH = 90  # the path of a socket is limited to about 100 characters

OnListening: TypeAlias = "Callable[[str | None, str], None]"  # gets the addresses of the data and control ports


def serve_with_workers(
    config: Config, path: Path, environ: Mapping[str, str], on_listening: OnListening, role: app.Role, worker_count: int
) -> int:
    """Run until all workers have ended, and return the exit code. `path` is the configuration file.

    Raises PriceKeeperError if the workers cannot be started.
    """
    _check_workers_possible(config, role)
    with ExitStack() as stack:
        host = config.listen.data.host
        sockets = reserve_port(host, config.listen.data.port)
        for each in sockets:
            stack.callback(each.close)
        _preload_modules(config)
        with suppress(OSError):  # a worker that needs it reports why it cannot be created
            Path(config.journal.dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        listen = replace(config.listen, data=Address(host, sockets[0].getsockname()[1]))
        slot = WorkerSlot(0, worker_count, stack.enter_context(_create_socket_folder()))
        handover = ConfigHandover(config, path, environ, slot.socket_folder)
        program = _WorkerProgram(replace(config, listen=listen), handover, environ, on_listening, role, os.getpid())
        return Supervisor(slot, program.run_worker, program.on_all_started, handover.publish).run()


def _check_workers_possible(config: Config, role: app.Role) -> None:
    if not (hasattr(os, "fork") and hasattr(socket, "SO_REUSEPORT")):
        raise PriceKeeperError("--workers: this system has no fork, or no SO_REUSEPORT, which several processes need")
    if role == "control":
        raise ConfigError(["--workers: they share a data port, and a control service has none"])
    if config.upstream.endpoint == data_port_wiring.SIMULATED:
        reason = "each worker would simulate a Bedrock of its own, with the jobs of its own calls alone"
        raise ConfigError([f"--workers: upstream.endpoint is {data_port_wiring.SIMULATED}, and {reason}"])


def _preload_modules(config: Config) -> None:
    """Import modules before the fork: once instead of once per worker, with memory pages that all workers share."""
    names = ["price_keeper.stores.dynamodb"] if config.store.engine == "dynamodb" else []
    names += ["botocore.session", "botocore.credentials"] if config.upstream.auth == "sigv4" else []
    for name in names:
        importlib.import_module(name)


@contextmanager
def _create_socket_folder() -> Iterator[Path]:
    """A directory that only this user can open, removed at the end."""
    try:
        folder = tempfile.mkdtemp(prefix="price-keeper-")
        if len(folder) > MAX_SOCKET_FOLDER_LENGTH:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="price-keeper-", dir="/tmp")  # created with mode 0700
    except OSError as failure:
        advice = f"{failure.strerror}; name a folder that can be written to in TMPDIR"
        raise PriceKeeperError(f"--workers: no folder for the sockets between the workers: {advice}") from None
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _WorkerProgram:
    """The program of one worker: runs the service in the worker slot that the supervisor assigns."""

    def __init__(
        self,
        config: Config,
        handover: ConfigHandover,
        environ: Mapping[str, str],
        on_listening: OnListening,
        role: app.Role,
        supervisor_pid: int,
    ) -> None:
        self._config = config
        self._handover = handover
        self._environ = environ
        self._on_listening = on_listening
        self._role = role
        self._supervisor_pid = supervisor_pid

    def on_all_started(self, addresses: dict[str, str]) -> None:
        """Called once all workers have started. A restarted first worker keeps the same control port."""
        listen = self._config.listen
        control = Address(listen.control.host, int(addresses["control"].rpartition(":")[2]))
        self._config = replace(self._config, listen=replace(listen, control=control))
        self._on_listening(str(listen.data), addresses["control"])

    def run_worker(self, slot: WorkerSlot, report_started: ReportStarted) -> None:
        async def on_started(started: app.StartedServer) -> None:
            report_started({"control": str(started.control_address)})

        logs.tag_worker(slot.number)
        handover = self._handover
        config = apply_reloadable(self._config, handover.config)
        worker_config = slot.localize_config(config)

        def reload_config() -> Config | None:
            new_config = handover.read_new_config()
            if new_config is None:
                return None
            os.kill(os.getpid(), signal.SIGHUP)  # the next reload may be published already, and refused
            return apply_reloadable(worker_config, new_config)

        run = partial(
            app.run,
            role=self._role,
            slot=slot,
            read_config=reload_config,
            is_reload_rejected=handover.is_reload_rejected,
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run(config, self._environ, on_started))
        finally:
            reload_signal.ignore_reload_signals()
            if os.getppid() != self._supervisor_pid:  # the supervisor is dead and cannot remove the directory
                with suppress(OSError):  # other workers still use it
                    slot.socket_folder.rmdir()
