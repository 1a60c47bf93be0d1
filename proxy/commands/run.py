"""`price-keeper serve` and `price-keeper dev`: the two ways to run the sidecar."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

import uvloop

from proxy import app
from proxy.commands.shared import Commands, add_config_option
from proxy.config import Address, Config, load


def add_to(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run the sidecar with a configuration")
    add_config_option(serve)
    serve.set_defaults(run=_serve)
    dev = commands.add_parser("dev", help="run on this machine alone: embedded store, no AWS account")
    _add_dev_options(dev)
    dev.set_defaults(run=_dev)


def _add_dev_options(dev: ArgumentParser) -> None:
    dev.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where it keeps its data")
    dev.add_argument("--control-port", type=int, default=8081, metavar="PORT", help="0 takes any free one")


def _serve(chosen: Namespace) -> int:
    config = load(chosen.config, os.environ)
    return _run(config)


def _dev(chosen: Namespace) -> int:
    config = Config.development()
    store = dataclasses.replace(config.store, path=str(chosen.data_dir / "price-keeper.db"))
    listen = dataclasses.replace(config.listen, control=Address("127.0.0.1", chosen.control_port))
    return _run(dataclasses.replace(config, store=store, listen=listen))


def _run(config: Config) -> int:
    def tell(control: Address) -> None:
        print(f"Bedrock Price Keeper is ready. Health: http://{control}/ready", flush=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(app.run(config, tell))
    return 0
