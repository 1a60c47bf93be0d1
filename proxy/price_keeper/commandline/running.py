"""Commands that run something: `dev`, `serve`."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds
from price_keeper.commandline.options import add_config_option, add_json_option, add_port_options


def add_run_commands(root: CommandParser) -> None:
    _add_dev(root)
    _add_serve(root)


def _add_dev(root: CommandParser) -> None:
    dev = root.add_command(
        "dev",
        "run on this machine alone: embedded store, simulated Bedrock",
        "It needs no AWS account and no configuration. It makes a demo org with an app, and prints what to paste into "
        "another shell, with a first call to try. What it keeps is in one folder; take that away to begin anew.",
        ("Run in ./data, at the usual ports", "price-keeper dev"),
        ("Beside another one", "price-keeper dev --data-dir other --port 0 --control-port 0"),
        ("With https for apps", "price-keeper dev --tls"),
        target="dev.run_dev",
        heading="Run",
    )
    text = "where it keeps its data; default: data"
    dev.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help=text)
    add_port_options(dev)
    dev.add_argument("--tls", action="store_true", help="https for apps, by an authority made for this machine")
    add_json_option(dev)


def _add_serve(root: CommandParser) -> None:
    serve = root.add_command(
        "serve",
        "run the sidecar with a configuration",
        "SIGTERM and Ctrl-C drain it: calls under way are finished first. SIGHUP takes on other labels and prices. Try "
        "a new configuration with price-keeper check-config, and this machine with price-keeper doctor.",
        ("Run with the config.yaml that is here", "price-keeper serve"),
        (
            "A sidecar that makes no tokens, in four processes",
            "price-keeper serve --config sidecar.yaml --role sidecar --workers 4",
        ),
        ("The control API alone", "price-keeper serve --role control"),
        (
            "On another port, without a change of the file",
            "PRICE_KEEPER__LISTEN__DATA=127.0.0.1:9090 price-keeper serve",
        ),
        target="run.run_serve",
        heading="Run",
    )
    add_config_option(serve)
    text = "sidecar: serves calls and makes no tokens; control: the control API alone; default: both"
    serve.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    text = "processes that share the data port, 1 to 64; default: 1"
    serve.add_argument("--workers", type=kinds.parse_worker_count, default=1, metavar="N", help=text)
    add_json_option(serve)
