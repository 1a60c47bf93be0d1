"""Options that many commands have. A metavar of FILE or DIR is what shells complete with files or folders."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds

API_URL_VARIABLE = "PRICE_KEEPER_API_URL"
DEFAULT_API_URL = "http://127.0.0.1:8081"
ADMIN_KEY_VARIABLE = "PRICE_KEEPER_API_KEY"
_CONFIG_HELP = "the configuration; default: config.yaml here"


def add_config_option(parser: CommandParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("config.yaml"),
        metavar="FILE",
        help="the configuration; default: config.yaml here",
    )


def add_store_options(parser: CommandParser) -> None:
    """Which store: that of a configuration, or that of `price-keeper dev`."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    group.add_argument("--data-dir", type=Path, metavar="DIR", help="the folder of price-keeper dev, without a FILE")


def add_json_option(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; errors too")


def add_api_option(parser: CommandParser) -> None:
    text = f"where the control API listens; default: the variable {API_URL_VARIABLE}, or {DEFAULT_API_URL}"
    parser.add_argument("--api", metavar="URL", help=text)


def add_admin_options(parser: CommandParser) -> None:
    text = f"the file with the admin key; default: the variable {ADMIN_KEY_VARIABLE}"
    parser.add_argument("--key-file", type=Path, metavar="FILE", help=text)
    add_api_option(parser)


def add_port_options(parser: CommandParser) -> None:
    for option, purpose in (("--port", "for apps"), ("--control-port", "for health and the control API")):
        default = 8080 if option == "--port" else 8081
        text = f"{purpose}; default: {default}; 0 takes any free one"
        parser.add_argument(option, type=kinds.parse_port, default=default, metavar="PORT", help=text)


def add_org_argument(parser: CommandParser) -> None:
    parser.add_argument("org", metavar="ORG", help="the org's id or name")
