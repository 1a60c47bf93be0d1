"""Commands that look at a configuration and at what it needs: `check-config`, `doctor`, `tables`, `keys`."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds
from price_keeper.commandline.options import add_config_option, add_json_option, add_port_options, add_store_options

CONFIGURE_HEADING = "Configure"


def add_configure_commands(root: CommandParser) -> None:
    _add_check_config(root)
    _add_doctor(root)
    _add_tables(root)
    _add_keys(root)


def _add_check_config(root: CommandParser) -> None:
    check = root.add_command(
        "check-config",
        "say every mistake of a configuration, with its line",
        "The file and the variables PRICE_KEEPER__... are read as by price-keeper serve. Nothing is started.",
        ("The config.yaml that is here", "price-keeper check-config"),
        ("Another one, for a program", "price-keeper check-config --config sidecar.yaml --json"),
        target="check_config.run_check_config",
        heading=CONFIGURE_HEADING,
    )
    add_config_option(check)
    add_json_option(check)


def _add_doctor(root: CommandParser) -> None:
    doctor = root.add_command(
        "doctor",
        "look at all that a role needs here; exit code 1 if something is amiss",
        "It changes nothing, and says how to mend what it finds. Run it where price-keeper serve is to run: as the "
        "same user, with the same environment and the same role.",
        ("For a sidecar", "price-keeper doctor --config sidecar.yaml --role sidecar"),
        ("For price-keeper dev in ./data", "price-keeper doctor --data-dir data"),
        ("For a program", "price-keeper doctor --data-dir data --json"),
        target="doctor.run_doctor",
        heading=CONFIGURE_HEADING,
    )
    add_store_options(doctor)
    add_port_options(doctor)
    text = "of price-keeper serve, which is to run here; default: both"
    doctor.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    add_json_option(doctor)


def _add_tables(root: CommandParser) -> None:
    tables = root.add_command(
        "tables",
        "make, check and describe the store's tables",
        "Which store it is, the configuration says. With SQLite price-keeper serve makes them itself; with DynamoDB "
        "they are made once, by this command or by the CloudFormation template.",
        heading=CONFIGURE_HEADING,
    )
    create = tables.add_command(
        "create",
        "make the tables that are missing; safe to run again",
        "In DynamoDB a new table takes some ten seconds.",
        ("Those of the config.yaml that is here", "price-keeper tables create"),
        target="tables.run_tables_create",
    )
    check = tables.add_command(
        "check",
        "compare the tables with what they should be; exit code 1 if they differ",
        "",
        ("Those of the config.yaml that is here", "price-keeper tables check"),
        ("For a program", "price-keeper tables check --json"),
        target="tables.run_tables_check",
    )
    describe = tables.add_command(
        "describe",
        "list the tables, their keys and what they are for",
        "",
        ("For a person", "price-keeper tables describe"),
        ("For CloudFormation", "price-keeper tables describe --cloudformation > tables.yaml"),
        target="tables.run_tables_describe",
    )
    text = "print them as a CloudFormation template; YAML, or JSON with --json"
    describe.add_argument("--cloudformation", action="store_true", help=text)
    for parser in (create, check, describe):
        add_config_option(parser)
        add_json_option(parser)


def _add_keys(root: CommandParser) -> None:
    keys = root.add_command("keys", "make the keys that tokens are signed with", "", heading=CONFIGURE_HEADING)
    new = keys.add_command(
        "new",
        "make a key, and tell what to write into config.yaml",
        "It never writes over a file. It also tells how a new key takes the place of another without refusing anybody.",
        ("A pair: control services sign, sidecars verify", "price-keeper keys new --kid 2026-11 --out keys"),
        ("One secret, for one machine", "price-keeper keys new --kid k1 --alg HS256 --out keys"),
        target="keys.run_keys_new",
    )
    new.add_argument(
        "--alg",
        choices=("EdDSA", "RS256", "HS256"),
        default="EdDSA",
        help="HS256 for one machine; EdDSA or RS256 where sidecars verify and must not mint; default: EdDSA",
    )
    new.add_argument(
        "--kid", type=kinds.parse_key_id, required=True, metavar="ID", help="its name, which stands in every token"
    )
    new.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for its files")
    add_json_option(new)
