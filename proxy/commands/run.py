"""`price-keeper serve`: runs the sidecar with a configuration, in one process or in several."""

from __future__ import annotations

import asyncio
import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping

import uvloop

from proxy import app
from proxy.commands import crew
from proxy.commands.shared import Commands, add_config_option
from proxy.config import Config, load
from proxy.workers.place import MOST


def add_to(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the sidecar with a configuration")
    add_config_option(serve)
    text = "sidecar: serves calls and makes no tokens; control: the control API alone; default: both"
    serve.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    text = f"processes that share the data port, 1 to {MOST}; default: 1"
    serve.add_argument("--workers", type=_workers, default=1, metavar="N", help=text)
    serve.set_defaults(run=_serve)


def _workers(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MOST):
        raise ArgumentTypeError(f"a number from 1 to {MOST}, not {text}")
    return int(text)


def _serve(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ)
    tell = _telling(chosen.role, "http" if config.listen.tls is None else "https")
    if chosen.workers > 1:
        return crew.served(config, os.environ, tell, chosen.role, chosen.workers)

    async def on_started(started: app.Started) -> None:
        tell(None if started.data is None else str(started.data), str(started.control))

    run_until_stopped(config, os.environ, on_started, chosen.role)
    return 0


def _telling(role: app.Role, scheme: str) -> Callable[[str | None, str], None]:
    def tell(data: str | None, control: str) -> None:
        if data is not None:
            print(f"Bedrock Price Keeper listens on {scheme}://{data}")
        if role == "control":
            print(f"Bedrock Price Keeper, control service: http://{control}/openapi.json")
        print(f"health and readiness: http://{control}/ready", flush=True)

    return tell


def run_until_stopped(config: Config, environ: Mapping[str, str], tell: app.OnStarted, role: app.Role = "both") -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(app.run(config, environ, tell, role=role))
