"""`price-keeper serve`: runs the sidecar with a configuration."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Mapping

import uvloop

from proxy import app
from proxy.commands.shared import Commands, add_config_option
from proxy.config import Config, load


def add_to(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the sidecar with a configuration")
    add_config_option(serve)
    text = "sidecar: serves calls and makes no tokens; control: the control API alone; default: both"
    serve.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    serve.set_defaults(run=_serve)


def _serve(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ)
    scheme = "http" if config.listen.tls is None else "https"

    async def tell(started: app.Started) -> None:
        if started.data is not None:
            print(f"Bedrock Price Keeper listens on {scheme}://{started.data}")
        if chosen.role == "control":
            print(f"Bedrock Price Keeper, control service: http://{started.control}/openapi.json")
        print(f"health and readiness: http://{started.control}/ready", flush=True)

    run_until_stopped(config, os.environ, tell, chosen.role)
    return 0


def run_until_stopped(config: Config, environ: Mapping[str, str], tell: app.OnStarted, role: app.Role = "both") -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(app.run(config, environ, tell, role=role))
