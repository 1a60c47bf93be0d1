"""What every command group uses."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    Commands: TypeAlias = "_SubParsersAction[ArgumentParser]"
else:
    Commands = Any


def add_config_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), metavar="FILE", help="default: config.yaml here"
    )


def add_json_option(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65_535:
        raise ArgumentTypeError(f"a port is a number up to 65535, and 0 any free one, not {number}")
    return number
