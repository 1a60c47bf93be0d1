"""`price-keeper serve`: runs the sidecar with a configuration, in one process or in several."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import uvloop

from price_keeper import app, hangups, logs
from price_keeper.cli.store_selection import load_config_at
from price_keeper.commands import crew
from price_keeper.config import Config, load_config
from price_keeper.memory import release_large_blocks


def run_serve(args: Namespace) -> int:
    config, reload_config = load_config_at(args.config), partial(load_config, args.config, os.environ)
    disable_core_dumps()
    release_large_blocks()
    logs.configure_logging(config.telemetry.logs, config.telemetry.log_level)
    scheme = "http" if config.listen.tls is None else "https"
    print_addresses = _create_json_printer(scheme) if args.json else _create_text_printer(args.role, scheme)
    if args.workers > 1:
        return crew.serve_with_workers(config, args.config, os.environ, print_addresses, args.role, args.workers)

    async def on_started(started: app.StartedServer) -> None:
        print_addresses(
            None if started.data_address is None else str(started.data_address), str(started.control_address)
        )

    run_until_stopped(config, os.environ, on_started, args.role, reload_config)
    return 0


def _create_text_printer(role: app.Role, scheme: str) -> Callable[[str | None, str], None]:
    def print_addresses(data_address: str | None, control_address: str) -> None:
        if data_address is not None:
            print(f"Bedrock Price Keeper listens on {scheme}://{data_address}")
        if role == "control":
            print(f"Bedrock Price Keeper, control service: http://{control_address}/openapi.json")
        print(f"health and readiness: http://{control_address}/ready", flush=True)

    return print_addresses


def _create_json_printer(scheme: str) -> Callable[[str | None, str], None]:
    """On one line, when it is ready."""

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
        hangups.ignore_reload_signals()
