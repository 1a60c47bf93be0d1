"""Options that many commands have. A metavar of FILE or DIR is what shells complete with files or folders."""

from __future__ import annotations

from pathlib import Path

from price_keeper.commandline import kinds
from price_keeper.commandline.parser import CommandParser

API_VARIABLE = "PRICE_KEEPER_API_URL"
USUAL_API = "http://127.0.0.1:8081"
KEY_VARIABLE = "PRICE_KEEPER_API_KEY"
_CONFIG = "the configuration; default: config.yaml here"


def add_config(parser: CommandParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("config.yaml"),
        metavar="FILE",
        help="the configuration; default: config.yaml here",
    )


def add_places(parser: CommandParser) -> None:
    """Which store: that of a configuration, or that of `price-keeper dev`."""
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG)
    places.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of price-keeper dev, without a FILE")


def add_json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; errors too")


def add_api(parser: CommandParser) -> None:
    text = f"where the control API listens; default: the variable {API_VARIABLE}, or {USUAL_API}"
    parser.add_argument("--api", metavar="URL", help=text)


def add_admin(parser: CommandParser) -> None:
    text = f"the file with the admin key; default: the variable {KEY_VARIABLE}"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)
    add_api(parser)


def add_ports(parser: CommandParser) -> None:
    for option, whose in (("--port", "for apps"), ("--control-port", "for health and the control API")):
        default = 8080 if option == "--port" else 8081
        text = f"{whose}; default: {default}; 0 takes any free one"
        parser.add_argument(option, type=kinds.parse_port, default=default, metavar="PORT", help=text)


def add_org(parser: CommandParser) -> None:
    parser.add_argument("org", metavar="ORG", help="the org's id or name")
