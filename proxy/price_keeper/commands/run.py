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
from price_keeper.commands import crew
from price_keeper.commands.places import load_config_at
from price_keeper.config import Config, load_config
from price_keeper.memory import release_large_blocks


def serve(args: Namespace) -> int:
    config, read = load_config_at(args.config), partial(load_config, args.config, os.environ)
    leave_no_core()
    release_large_blocks()
    logs.configure_logging(config.telemetry.logs, config.telemetry.log_level)
    scheme = "http" if config.listen.tls is None else "https"
    tell = _telling_json(scheme) if args.json else _telling(args.role, scheme)
    if args.workers > 1:
        return crew.served(config, args.config, os.environ, tell, args.role, args.workers)

    async def on_started(started: app.StartedServer) -> None:
        tell(None if started.data_address is None else str(started.data_address), str(started.control_address))

    run_until_stopped(config, os.environ, on_started, args.role, read)
    return 0


def _telling(role: app.Role, scheme: str) -> Callable[[str | None, str], None]:
    def tell(data: str | None, control: str) -> None:
        if data is not None:
            print(f"Bedrock Price Keeper listens on {scheme}://{data}")
        if role == "control":
            print(f"Bedrock Price Keeper, control service: http://{control}/openapi.json")
        print(f"health and readiness: http://{control}/ready", flush=True)

    return tell


def _telling_json(scheme: str) -> Callable[[str | None, str], None]:
    """On one line, when it is ready."""

    def tell(data: str | None, control: str) -> None:
        told = {"data": None if data is None else f"{scheme}://{data}", "control": f"http://{control}"}
        print(json.dumps(told), flush=True)

    return tell


def leave_no_core() -> None:
    """A process's memory holds prompts, tokens and AWS credentials, and a crash must not write them to a disk."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_until_stopped(
    config: Config,
    environ: Mapping[str, str],
    tell: app.OnStarted,
    role: app.Role = "both",
    read: Callable[[], Config] | None = None,
) -> None:
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.run(config, environ, tell, role=role, read_config=read))
    finally:
        hangups.ignore_reload_signals()
