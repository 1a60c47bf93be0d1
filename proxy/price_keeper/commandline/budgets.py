"""Commands about money: `org`, `app`, `override`, `spend`, `export`."""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli.command_parser import CommandParser
from price_keeper.commandline import kinds
from price_keeper.commandline.options import add_admin_options, add_json_option, add_org_argument, add_store_options

BUDGETS_HEADING = "Spend and budgets"
_CONTROL_API_NOTE = "It asks the control API, with the admin key."
_SETTINGS_FILE_HELP = "the settings in YAML or JSON; - reads standard input"
_PERIOD_SUGGESTIONS = ("today", "yesterday")
_PERIOD_HELP = "today, yesterday, a day (2026-11-18), a month (2026-11), or a range of these (2026-11-01..today)"


def add_budget_commands(root: CommandParser) -> None:
    _add_org(root)
    _add_app(root)
    _add_override(root)
    _add_spend(root)
    _add_export(root)


def _add_org(root: CommandParser) -> None:
    org = root.add_command("org", "set and tell what orgs may spend", _CONTROL_API_NOTE, heading=BUDGETS_HEADING)
    put = org.add_command(
        "put",
        "make an org, or put new settings in the place of its own",
        "What the file leaves out goes back to its default. The first time, it tells how the org's secret is fetched, "
        "once. docs/orgs.md has every setting.",
        ("Make an org, by an id of your choice", "price-keeper org put 6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b acme.yaml"),
        ("Change it, by its name", "price-keeper org put Acme acme.yaml"),
        target="org.run_org_put",
    )
    show = org.add_command(
        "show",
        "tell an org's settings, and what holds now",
        "",
        ("For a person", "price-keeper org show Acme"),
        ("For a program", "price-keeper org show Acme --json"),
        target="org.run_org_show",
    )
    for parser in (put, show):
        parser.add_argument("org", metavar="ORG", help="its id, a UUID, or the name of one that is there")
    put.add_argument("file", metavar="FILE", help=_SETTINGS_FILE_HELP)
    listing = org.add_command(
        "list", "list the orgs", "", ("All of them", "price-keeper org list"), target="org.run_org_list"
    )
    _add_control_api_options(put, show, listing)


def _add_app(root: CommandParser) -> None:
    app = root.add_command(
        "app", "set and tell what apps of an org may spend", _CONTROL_API_NOTE, heading=BUDGETS_HEADING
    )
    put = app.add_command(
        "put",
        "make an app, or put new settings in the place of its own",
        "What the file leaves out is as the org says. The first time, it tells how the app's secret is fetched, once.",
        ("Make an app, or change it", "price-keeper app put Acme shop shop.yaml"),
        (
            "With nothing of its own but a name",
            "echo 'app_name: Robot' | price-keeper app put Acme robot -",
        ),
        target="app.run_app_put",
    )
    show = app.add_command(
        "show",
        "tell what holds for an app, and which of it is its own",
        "",
        ("For a person", "price-keeper app show Acme shop"),
        target="app.run_app_show",
    )
    listing = app.add_command(
        "list",
        "list the apps of an org",
        "",
        ("All of Acme's", "price-keeper app list Acme"),
        target="app.run_app_list",
    )
    for parser in (put, show, listing):
        add_org_argument(parser)
    for parser in (put, show):
        text = "1 to 64 letters, digits or any of ._-"
        parser.add_argument("app", type=kinds.parse_app_id, metavar="APP", help=text)
    put.add_argument("file", metavar="FILE", help=_SETTINGS_FILE_HELP)
    _add_control_api_options(put, show, listing)


def _add_override(root: CommandParser) -> None:
    override = root.add_command(
        "override", "say by hand which label is in force", _CONTROL_API_NOTE, heading=BUDGETS_HEADING
    )
    put = override.add_command(
        "set",
        "put a label in force, up or down the ordering, until the period ends",
        "It never lasts longer than the period, and stands in the audit with its reason.",
        (
            "The cheapest label for an app, for two hours",
            'price-keeper override set Acme --app shop economy --reason "load test" --until +2h',
        ),
        target="override.run_override_set",
    )
    clear = override.add_command(
        "clear",
        "let the quotas decide again; exit code 1 if nobody said otherwise",
        "",
        ("For an app", "price-keeper override clear Acme --app shop"),
        target="override.run_override_clear",
    )
    show = override.add_command(
        "show",
        "tell which override is in force",
        "",
        ("For an app", "price-keeper override show Acme --app shop"),
        target="override.run_override_show",
    )
    for parser in (put, clear, show):
        add_org_argument(parser)
        parser.add_argument("--app", type=kinds.parse_app_id, metavar="APP", help="where quotas apply to each app")
    put.add_argument("label", metavar="LABEL", help="one of the ordering")
    put.add_argument("--reason", required=True, metavar="TEXT", help="for whoever wonders about it")
    text = "2026-11-18T15:00 in the org's time zone, or +2h; default: the end of the period"
    put.add_argument("--until", metavar="TIME", help=text)
    put.add_argument("--who", metavar="NAME", help="default: the user of this system")
    _add_control_api_options(put, clear, show)


def _add_control_api_options(*parsers: CommandParser) -> None:
    for parser in parsers:
        add_json_option(parser)
        add_admin_options(parser)


def _add_spend(root: CommandParser) -> None:
    spend = root.add_command(
        "spend",
        "tell what was spent, by org, app, label or day",
        "It reads the store, also while sidecars write to it. A day is the org's own, in its time zone. For many days "
        "at once price-keeper export writes a file.",
        ("What was spent today, in price-keeper dev's ./data", "price-keeper spend --data-dir data"),
        ("An org's month, day by day", "price-keeper spend 2026-11-01..today --org Acme --by day"),
        ("For a spreadsheet", "price-keeper spend yesterday --csv > yesterday.csv"),
        ("What one app spent today, for a program", "price-keeper spend --org Acme --app shop --json"),
        target="spend.run_spend",
        heading=BUDGETS_HEADING,
    )
    text = f"{_PERIOD_HELP}; default: today"
    spend.add_argument("when", nargs="?", default="today", type=kinds.parse_period, metavar="WHEN", help=text)
    spend.suggestions["WHEN"] = _PERIOD_SUGGESTIONS
    _add_spend_filters(spend)
    text = "one row for each of these: org,app,label,day"
    spend.add_argument("--by", type=kinds.parse_group_by, metavar="WHAT", help=text)
    outputs = spend.add_mutually_exclusive_group()
    text = "print JSON, money as exact micro-dollars in strings; errors too"
    outputs.add_argument("--json", action="store_true", help=text)
    outputs.add_argument("--csv", action="store_true", help="print CSV, money as exact dollars")
    outputs.add_argument("--focus", action="store_true", help="print CSV by FOCUS 1.3, as clouds bill")
    _add_billing_account(spend, "--focus")
    add_store_options(spend)


def _add_export(root: CommandParser) -> None:
    export = root.add_command(
        "export",
        "write what was spent over many days into a file",
        "One row for each org, app, label and day, in the order of the days. It reads a week at a time, so a year "
        "needs no more memory than that. The file comes to be when all of it is written, or not at all.",
        ("A month as CSV", "price-keeper export 2026-11 --out spend.csv"),
        (
            "All of it beside the cloud's own bill",
            "price-keeper export 2026-11 --format focus --billing-account 123456789012 --out focus.csv",
        ),
        (
            "An org's, again, in the place of the last one",
            "price-keeper export 2026-11-01..yesterday --org Acme --format json --out acme.json --force",
        ),
        target="export.run_export",
        heading=BUDGETS_HEADING,
    )
    export.add_argument(
        "when",
        nargs="?",
        default="today",
        type=kinds.parse_period,
        metavar="PERIOD",
        help=f"{_PERIOD_HELP}; default: today",
    )
    export.suggestions["PERIOD"] = _PERIOD_SUGGESTIONS
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    text = "csv: exact dollars; json: exact micro-dollars; focus: CSV by FOCUS 1.3, as clouds bill; default: csv"
    export.add_argument("--format", choices=("csv", "json", "focus"), default="csv", help=text)
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    _add_spend_filters(export)
    _add_billing_account(export, "--format focus")
    add_json_option(export)
    add_store_options(export)


def _add_spend_filters(parser: CommandParser) -> None:
    parser.add_argument("--org", metavar="ORG", help="only this org, by its id or its name")
    parser.add_argument("--app", metavar="APP", help="only this app; - is callers without an app")
    parser.add_argument("--label", metavar="LABEL", help="only this label")


def _add_billing_account(parser: CommandParser, required_option: str) -> None:
    text = f"with {required_option}: the AWS account that is billed, as it stands there"
    parser.add_argument("--billing-account", metavar="ID", help=text)
