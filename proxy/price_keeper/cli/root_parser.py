"""All commands as they are declared: names, arguments, help, examples, and which function runs each. Start here.

`build_root_parser` lists the commands in groups: run, configure, spend and budgets, access, operate. Importing this
module must stay cheap; a test in tests/tidy/test_files.py fails if help or completion load asyncio, yaml or anything
else heavy.
"""

from __future__ import annotations

from pathlib import Path

from price_keeper.cli import shared_arguments
from price_keeper.cli.command_parser import EXIT_CODES, CommandParser
from price_keeper.cli.shared_arguments import (
    add_admin_options,
    add_api_option,
    add_app_option,
    add_config_option,
    add_json_option,
    add_org_argument,
    add_port_options,
    add_store_options,
)
from price_keeper.control.api_constants import DEFAULT_GRACE_HOURS

PROGRAM = "price-keeper"
CLIENT_SECRET_VARIABLE = "PRICE_KEEPER_CLIENT_SECRET"  # noqa: S105 - its name
DEFAULT_DATA_URL = "http://127.0.0.1:8080"
DEFAULT_AUDIT_LIMIT = 20
SHELLS = ("bash", "zsh", "fish")
_CONTROL_API_NOTE = "It asks the control API, with the admin key."
_SETTINGS_FILE_HELP = "the settings in YAML or JSON; - reads standard input"
_EXAMPLE_CLIENT_ID = "org-6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b-app-shop"


def build_root_parser() -> CommandParser:
    codes = "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES)
    root = CommandParser(
        prog=PROGRAM,
        description="Keeps every org and app on Amazon Bedrock inside its budget.",
        epilog=f"More of a command: {PROGRAM} help COMMAND. To begin: {PROGRAM} demo.\n\nexit codes:\n{codes}",
    )
    root.add_argument("--version", action="store_true", help="the same as the command version")
    for heading, declarations in (
        ("Run", (_add_demo, _add_dev, _add_serve)),
        ("Configure", (_add_check_config, _add_doctor, _add_tables, _add_keys)),
        ("Spend and budgets", (_add_apply, _add_org, _add_app, _add_override, _add_spend, _add_export)),
        ("Access", (_add_token, _add_rotate, _add_session)),
        ("Operate", (_add_audit, _add_replay, _add_completion, _add_version, _add_help)),
    ):
        root.heading_of_commands = heading
        for add_command in declarations:
            add_command(root)
    return root


def _add_demo(root: CommandParser) -> None:
    demo = root.add_command(
        "demo",
        "watch a budget fall back from label to label, in under a minute",
        "It starts a sidecar with an embedded store and a simulated Bedrock, gives an app a small budget and calls "
        "until that is spent. It needs no AWS account and leaves nothing behind. Ctrl-C ends it early.",
        ("Watch it", "price-keeper demo"),
        ("What happened, for a program", "price-keeper demo --json"),
        target="demo_command.run_demo",
    )
    add_json_option(demo)


def _add_dev(root: CommandParser) -> None:
    dev = root.add_command(
        "dev",
        "run on this machine alone: embedded store, simulated Bedrock",
        "It needs no AWS account and no configuration. It makes a demo org with an app, and prints what to paste into "
        "another shell, with a first call to try. All its data is in one folder; delete that to start again.",
        ("Run in ./data, at the usual ports", "price-keeper dev"),
        ("A second one beside it", "price-keeper dev --data-dir other --port 0 --control-port 0"),
        ("With https for apps", "price-keeper dev --tls"),
        ("With the labels of a configuration", "price-keeper dev --config config.yaml --data-dir own"),
        target="dev_command.run_dev",
    )
    text = "where it keeps its data; default: data"
    dev.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help=text)
    add_port_options(dev)
    dev.add_argument("--tls", action="store_true", help="https for apps, by an authority made for this machine")
    text = "take the labels and prices of this file; the demo org gets its labels when a data folder is first used"
    dev.add_argument("--config", type=Path, metavar="FILE", help=text)
    add_json_option(dev)


def _add_serve(root: CommandParser) -> None:
    serve = root.add_command(
        "serve",
        "run the sidecar with a configuration",
        "SIGTERM and Ctrl-C drain it: running calls are finished first. SIGHUP reloads labels and prices. Check a new "
        "configuration with price-keeper check-config, and this machine with price-keeper doctor.",
        ("Run with the config.yaml that is here", "price-keeper serve"),
        (
            "A sidecar that makes no tokens, in four processes",
            "price-keeper serve --config sidecar.yaml --role sidecar --workers 4",
        ),
        ("The control API alone", "price-keeper serve --role control"),
        (
            "On another port, without changing the file",
            "PRICE_KEEPER__LISTEN__DATA=127.0.0.1:9090 price-keeper serve",
        ),
        target="serve_command.run_serve",
    )
    add_config_option(serve)
    text = "sidecar: serves calls and makes no tokens; control: the control API alone; default: both"
    serve.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    text = "processes that share the data port, 1 to 64; default: 1"
    serve.add_argument("--workers", type=shared_arguments.parse_worker_count, default=1, metavar="N", help=text)
    add_json_option(serve)


def _add_check_config(root: CommandParser) -> None:
    check = root.add_command(
        "check-config",
        "report every mistake of a configuration, with its line",
        "The file and the variables PRICE_KEEPER__... are read as by price-keeper serve. Nothing is started.",
        ("The config.yaml that is here", "price-keeper check-config"),
        ("Another one, for a program", "price-keeper check-config --config sidecar.yaml --json"),
        ("With the quotas of an org, in dollars", "price-keeper check-config --settings acme.yaml"),
        target="setup_commands.run_check_config",
    )
    add_config_option(check)
    text = (
        "the files of price-keeper apply, org put or app put, too: their amounts, and what a bare number is in dollars"
    )
    check.add_argument("--settings", type=Path, metavar="FILE", help=text)
    add_json_option(check)


def _add_doctor(root: CommandParser) -> None:
    doctor = root.add_command(
        "doctor",
        "check all that a role needs here; exit code 1 if something is wrong",
        "It changes nothing, and says how to fix what it finds. Run it where price-keeper serve is to run: as the "
        "same user, with the same environment and the same role.",
        ("For a sidecar", "price-keeper doctor --config sidecar.yaml --role sidecar"),
        ("For price-keeper dev in ./data", "price-keeper doctor --data-dir data"),
        ("For a program", "price-keeper doctor --data-dir data --json"),
        target="doctor_command.run_doctor",
    )
    add_store_options(doctor)
    add_port_options(doctor)
    text = "of price-keeper serve, which is to run here; default: both"
    doctor.add_argument("--role", choices=("both", "sidecar", "control"), default="both", help=text)
    add_json_option(doctor)


def _add_tables(root: CommandParser) -> None:
    tables = root.add_command(
        "tables",
        "create, check and describe the store's tables",
        "The configuration names the store. With SQLite price-keeper serve creates the tables itself; with DynamoDB "
        "they are created once, by this command or by the CloudFormation template.",
    )
    create = tables.add_command(
        "create",
        "create the missing tables; safe to run again",
        "In DynamoDB a new table takes about ten seconds. Every table gets deletion protection. A key and tags are for "
        "new tables; those of a table that exists stay as they are.",
        ("Those of the config.yaml that is here", "price-keeper tables create"),
        ("With a key and a tag of yours", "price-keeper tables create --kms-key alias/spend --tag team=payments"),
        target="setup_commands.run_tables_create",
    )
    text = "the KMS key that encrypts new tables, as ARN, id or alias; default: the key that DynamoDB owns"
    create.add_argument("--kms-key", metavar="KEY", help=text)
    text = "a tag of new tables; may be given several times"
    create.add_argument(
        "--tag", type=shared_arguments.parse_tag, action="append", default=[], metavar="NAME=VALUE", help=text
    )
    check = tables.add_command(
        "check",
        "compare the tables with what they should be; exit code 1 if they differ",
        "",
        ("Those of the config.yaml that is here", "price-keeper tables check"),
        ("For a program", "price-keeper tables check --json"),
        target="setup_commands.run_tables_check",
    )
    describe = tables.add_command(
        "describe",
        "list the tables, their keys and their purpose",
        "",
        ("For a person", "price-keeper tables describe"),
        ("For CloudFormation", "price-keeper tables describe --cloudformation > tables.yaml"),
        target="setup_commands.run_tables_describe",
    )
    text = "print them as a CloudFormation template; YAML, or JSON with --json"
    describe.add_argument("--cloudformation", action="store_true", help=text)
    for parser in (create, check, describe):
        add_config_option(parser)
        add_json_option(parser)


def _add_keys(root: CommandParser) -> None:
    keys = root.add_command("keys", "create the keys that sign tokens", "")
    new = keys.add_command(
        "new",
        "create a key, and print what to write into config.yaml",
        "It never overwrites a file. It also prints how to rotate keys without refusing any valid token.",
        ("A pair: control services sign, sidecars verify", "price-keeper keys new --kid 2026-11 --out keys"),
        ("One secret, for one machine", "price-keeper keys new --kid k1 --alg HS256 --out keys"),
        target="keys_command.run_keys_new",
    )
    new.add_argument(
        "--alg",
        choices=("EdDSA", "RS256", "HS256"),
        default="EdDSA",
        help="HS256 for one machine; EdDSA or RS256 where sidecars verify and must not mint; default: EdDSA",
    )
    new.add_argument(
        "--kid",
        type=shared_arguments.parse_key_id,
        required=True,
        metavar="ID",
        help="its id, which is part of every token",
    )
    new.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder for its files")
    add_json_option(new)


def _add_apply(root: CommandParser) -> None:
    apply = root.add_command(
        "apply",
        "bring orgs and apps to the state that YAML files describe",
        f"It prints what differs, changes that, and is safe to run again. Settings that an entry omits stay as they "
        f"are. An entry without an id is found by its name. docs/orgs.md has an example. {_CONTROL_API_NOTE}",
        ("See what a file would change", "price-keeper apply -f orgs.yaml --dry-run"),
        ("Change it", "price-keeper apply -f orgs.yaml"),
        target="apply_command.run_apply",
    )
    text = "a file of orgs in YAML or JSON, or a folder of such files; - reads standard input"
    apply.add_argument("-f", "--file", type=Path, required=True, metavar="FILE", help=text)
    apply.add_argument("--dry-run", action="store_true", help="print what would be changed, and change nothing")
    _add_control_api_options(apply)


def _add_org(root: CommandParser) -> None:
    org = root.add_command("org", "set and show what orgs may spend", _CONTROL_API_NOTE)
    put = org.add_command(
        "put",
        "create an org, or replace its settings",
        "Settings that the file omits return to their defaults. The first time, it prints how to fetch the org's "
        "secret, once. docs/orgs.md has every setting.",
        ("Create an org by an id", "price-keeper org put 6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b acme.yaml"),
        ("Change it, by its name", "price-keeper org put Acme acme.yaml"),
        target="org_commands.run_org_put",
    )
    show = org.add_command(
        "show",
        "show an org's settings, and which are in force",
        "",
        ("For a person", "price-keeper org show Acme"),
        ("For a program", "price-keeper org show Acme --json"),
        target="org_commands.run_org_show",
    )
    for parser in (put, show):
        parser.add_argument("org", metavar="ORG", help="its id, a UUID, or the name of an existing org")
    put.add_argument("file", metavar="FILE", help=_SETTINGS_FILE_HELP)
    listing = org.add_command(
        "list", "list the orgs", "", ("All of them", "price-keeper org list"), target="org_commands.run_org_list"
    )
    key = org.add_command(
        "key",
        "create an org's administrator key, or its next one, and print it",
        "With it as admin key, this org and its apps can be created, changed and shown, and nothing else. It is shown "
        "only here. The key so far stays good for the grace, so that nothing stops.",
        ("The first one", "price-keeper org key Acme > acme.key"),
        ("The next one, after the key has leaked", "price-keeper org key Acme --grace 0 > acme.key"),
        ("None any more", "price-keeper org key Acme --remove"),
        target="org_commands.run_org_key",
    )
    add_org_argument(key)
    text = f"how long the key so far stays good, 0 to 168; default: {DEFAULT_GRACE_HOURS}"
    key.add_argument(
        "--grace", type=shared_arguments.parse_grace_hours, default=DEFAULT_GRACE_HOURS, metavar="HOURS", help=text
    )
    key.add_argument("--remove", action="store_true", help="remove the key, with the one that is in its grace")
    _add_control_api_options(put, show, listing, key)


def _add_app(root: CommandParser) -> None:
    app = root.add_command("app", "set and show what apps of an org may spend", _CONTROL_API_NOTE)
    put = app.add_command(
        "put",
        "create an app, or replace its settings",
        "Settings that the file omits are the org's. The first time, it prints how to fetch the app's secret, once.",
        ("Create an app, or change it", "price-keeper app put Acme shop shop.yaml"),
        (
            "With only a name of its own",
            "echo 'app_name: Robot' | price-keeper app put Acme robot -",
        ),
        target="org_commands.run_app_put",
    )
    show = app.add_command(
        "show",
        "show the settings in force for an app, and which are its own",
        "",
        ("For a person", "price-keeper app show Acme shop"),
        target="org_commands.run_app_show",
    )
    listing = app.add_command(
        "list",
        "list the apps of an org",
        "",
        ("All of Acme's", "price-keeper app list Acme"),
        target="org_commands.run_app_list",
    )
    text = "write the secret of a new app to this file, which must not be there yet; price-keeper token reads it"
    put.add_argument("--secret-file", type=Path, metavar="FILE", help=text)
    for parser in (put, show, listing):
        add_org_argument(parser)
    for parser in (put, show):
        text = "1 to 64 letters, digits or any of ._-"
        parser.add_argument("app", type=shared_arguments.parse_app_id, metavar="APP", help=text)
    put.add_argument("file", metavar="FILE", help=_SETTINGS_FILE_HELP)
    _add_control_api_options(put, show, listing)


def _add_override(root: CommandParser) -> None:
    override = root.add_command("override", "set the active label by hand", _CONTROL_API_NOTE)
    put = override.add_command(
        "set",
        "make a label active, up or down the ordering, until the period ends",
        "It never lasts longer than the period, and the audit log records it with its reason.",
        (
            "The cheapest label for an app, for two hours",
            'price-keeper override set Acme --app shop economy --reason "load test" --until +2h',
        ),
        target="override_commands.run_override_set",
    )
    clear = override.add_command(
        "clear",
        "let the quotas decide again; exit code 1 if there was no override",
        "",
        ("For an app", "price-keeper override clear Acme --app shop"),
        target="override_commands.run_override_clear",
    )
    show = override.add_command(
        "show",
        "show the override in force",
        "",
        ("For an app", "price-keeper override show Acme --app shop"),
        target="override_commands.run_override_show",
    )
    for parser in (put, clear, show):
        add_org_argument(parser)
        add_app_option(parser, "where quotas apply to each app")
    put.add_argument("label", metavar="LABEL", help="one of the ordering")
    # Required, but by the command: a mistyped label is reported first.
    put.add_argument("--reason", metavar="TEXT", help="required; recorded in the audit log")
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
        "show what was spent, by org, app, label or day",
        "It reads the store, also while sidecars write to it. A day is the org's own, in its time zone. For many days "
        "at once price-keeper export writes a file.",
        ("What was spent today, in price-keeper dev's ./data", "price-keeper spend --data-dir data"),
        ("An org's month, day by day", "price-keeper spend 2026-11-01..today --org Acme --by day"),
        ("For a spreadsheet", "price-keeper spend yesterday --csv > yesterday.csv"),
        ("What one app spent today, for a program", "price-keeper spend --org Acme --app shop --json"),
        target="spend_commands.run_spend",
    )
    _add_period(spend, "WHEN")
    _add_spend_filters(spend)
    text = "one row for each of these: org,app,label,day"
    spend.add_argument("--by", type=shared_arguments.parse_group_by, metavar="WHAT", help=text)
    text = "read all that was flushed, and not only totals: exact, and slower with many orgs"
    spend.add_argument("--consistent", action="store_true", help=text)
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
        "write the spend of many days to a file",
        "One row for each org, app, label and day, in the order of the days. It reads a week at a time, so a year "
        "needs only the memory for a week. The file appears when it is complete, or not at all.",
        ("A month as CSV", "price-keeper export 2026-11 --out spend.csv"),
        (
            "All of it beside the cloud's own bill",
            "price-keeper export 2026-11 --format focus --billing-account 123456789012 --out focus.csv",
        ),
        (
            "An org's, again, in the place of the last one",
            "price-keeper export 2026-11-01..yesterday --org Acme --format json --out acme.json --force",
        ),
        target="spend_commands.run_export",
    )
    _add_period(export, "PERIOD")
    export.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    text = "csv: exact dollars; json: exact micro-dollars; focus: CSV by FOCUS 1.3, as clouds bill; default: csv"
    export.add_argument("--format", choices=("csv", "json", "focus"), default="csv", help=text)
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    _add_spend_filters(export)
    _add_billing_account(export, "--format focus")
    add_json_option(export)
    add_store_options(export)


def _add_period(parser: CommandParser, metavar: str) -> None:
    text = "today, yesterday, a day (2026-11-18), a month (2026-11), or a range of these (2026-11-01..today)"
    text += "; default: today"
    parser.add_argument(
        "when", nargs="?", default="today", type=shared_arguments.parse_period, metavar=metavar, help=text
    )
    parser.suggestions[metavar] = ("today", "yesterday")


def _add_spend_filters(parser: CommandParser) -> None:
    parser.add_argument("--org", metavar="ORG", help="only this org, by its id or its name")
    parser.add_argument("--app", metavar="APP", help="only this app; - is callers without an app")
    parser.add_argument("--label", metavar="LABEL", help="only this label")


def _add_billing_account(parser: CommandParser, required_option: str) -> None:
    text = f"with {required_option}: the id of the AWS account that is billed"
    parser.add_argument("--billing-account", metavar="ID", help=text)


def _add_token(root: CommandParser) -> None:
    token = root.add_command(
        "token",
        "log a client in and print its access token",
        "The secret is never an argument, which every user of the machine could see.",
        ("The token alone", f"price-keeper token {_EXAMPLE_CLIENT_ID} --secret-file shop.secret"),
        (
            "Point this shell's AWS SDKs at the sidecar",
            f'eval "$(price-keeper token {_EXAMPLE_CLIENT_ID} --secret-file shop.secret --env)"',
        ),
        target="access_commands.run_token",
    )
    token.add_argument("client_id", metavar="CLIENT_ID", help="org-ORG or org-ORG-app-APP")
    text = f"the file with its secret; default: the variable {CLIENT_SECRET_VARIABLE}, or a question without echo"
    token.add_argument("--secret-file", type=Path, metavar="FILE", help=text)
    outputs = token.add_mutually_exclusive_group()
    outputs.add_argument("--env", action="store_true", help="print the lines that an app's shell needs")
    text = "print the whole response, with the refresh token; errors as JSON"
    outputs.add_argument("--json", action="store_true", help=text)
    text = f"with --env: where the app sends its calls; default: {DEFAULT_DATA_URL}"
    token.add_argument("--data", default=DEFAULT_DATA_URL, metavar="URL", help=text)
    add_api_option(token)


def _add_rotate(root: CommandParser) -> None:
    rotate = root.add_command(
        "rotate",
        "create a client's next secret and print it",
        "The secret so far stays good for a while, so that nothing stops. The new one alone goes to the output, so "
        "that it can be sent on to where it is kept.",
        ("An app's, with two hours to change it", "price-keeper rotate Acme --app shop --grace 2 > shop.secret"),
        ("For another person to fetch", "price-keeper rotate Acme --app shop --token-only"),
        target="access_commands.run_rotate",
    )
    add_org_argument(rotate)
    add_app_option(rotate, "one of its apps; without it, the org's own secret")
    text = f"how long the secret so far stays good, 0 to 168; default: {DEFAULT_GRACE_HOURS}"
    rotate.add_argument(
        "--grace", type=shared_arguments.parse_grace_hours, default=DEFAULT_GRACE_HOURS, metavar="HOURS", help=text
    )
    text = "print the retrieval token, with which another person can fetch the secret once within ten minutes"
    rotate.add_argument("--token-only", action="store_true", help=text)
    _add_control_api_options(rotate)


def _add_session(root: CommandParser) -> None:
    session = root.add_command("session", "list and end the sessions of a client, and show what was revoked", "")
    listing = session.add_command(
        "list",
        "list the sessions of an org or one of its apps, the oldest first",
        "",
        ("Those of an app", "price-keeper session list Acme --app shop"),
        target="access_commands.run_session_list",
    )
    revoke = session.add_command(
        "revoke",
        "end a session, and with it the access tokens made from it",
        "",
        ("All of an app's", "price-keeper session revoke Acme --app shop all"),
        target="access_commands.run_session_revoke",
    )
    show = session.add_command(
        "show",
        "show when a session or token was revoked, and when it would have expired",
        "It exits with 1 if no session or token of this client with this id is revoked.",
        ("One of an app's", "price-keeper session show Acme --app shop 0f8fad5b-d9cb-469f-a165-70867728950e"),
        target="access_commands.run_session_show",
    )
    for parser in (listing, revoke, show):
        add_org_argument(parser)
        add_app_option(parser, "one of its apps; without it, the org's own")
    _add_control_api_options(listing, revoke, show)
    text = "the id of a session, as session list shows it, or of a token, which is its claim jti"
    show.add_argument("session", type=shared_arguments.parse_revoked_id, metavar="ID", help=text)
    text = f"its id, as session list shows it, or {shared_arguments.ALL_SESSIONS}"
    revoke.add_argument("session", type=shared_arguments.parse_session_id, metavar="SESSION", help=text)
    revoke.suggestions["SESSION"] = (shared_arguments.ALL_SESSIONS,)


def _add_audit(root: CommandParser) -> None:
    audit = root.add_command(
        "audit",
        "show who changed the settings of an org and its apps, newest first",
        "It reads the store.",
        ("The last changes", "price-keeper audit Acme"),
        ("The last hundred, for a program", "price-keeper audit Acme --limit 100 --json"),
        target="audit_command.run_audit",
    )
    add_org_argument(audit)
    text = f"how many changes; default: {DEFAULT_AUDIT_LIMIT}"
    audit.add_argument(
        "--limit", type=shared_arguments.parse_audit_limit, default=DEFAULT_AUDIT_LIMIT, metavar="NUMBER", help=text
    )
    add_json_option(audit)
    add_store_options(audit)


def _add_replay(root: CommandParser) -> None:
    replay = root.add_command(
        "replay",
        "send the journal of a dead node to the store",
        "Calls that are in the store already are not counted again, so it is safe to run again. A process on this "
        "machine that writes to the journal is noticed; for a copy, or a disk of another machine, you must state that "
        "it has ended.",
        ("The journal of a disk that came back", "price-keeper replay /mnt/found/journal --owner-is-dead"),
        ("Also what is older than 34 days", "price-keeper replay /mnt/found/journal --owner-is-dead --force"),
        target="replay_command.run_replay",
    )
    replay.add_argument("folder", type=Path, metavar="DIR", help="the journal's folder; those of workers in it too")
    replay.add_argument(
        "--owner-is-dead",
        action="store_true",
        help="the process that wrote this journal has ended, and wrote nothing after this copy was made",
    )
    replay.add_argument("--force", action="store_true", help="also send segments whose markers have expired")
    add_config_option(replay)
    add_json_option(replay)


def _add_completion(root: CommandParser) -> None:
    completion = root.add_command(
        "completion",
        "print a script for the completion of these commands in a shell",
        "It completes commands, options, their values, files and folders, without starting price-keeper.",
        ("bash, now and in every new shell", "echo 'eval \"$(price-keeper completion bash)\"' >> ~/.bashrc"),
        ("zsh, behind compinit", "echo 'eval \"$(price-keeper completion zsh)\"' >> ~/.zshrc"),
        ("fish", "price-keeper completion fish > ~/.config/fish/completions/price-keeper.fish"),
        target="completion_command.run_completion",
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _add_version(root: CommandParser) -> None:
    version = root.add_command(
        "version",
        "print the version, and whether it is compiled",
        "",
        ("For a person", "price-keeper version"),
        ("For a program", "price-keeper version --json"),
        target="version_command.run_version",
    )
    add_json_option(version)


def _add_help(root: CommandParser) -> None:
    help_command = root.add_command(
        "help",
        "print the commands, or the help of one",
        "",
        ("Of one command", "price-keeper help org put"),
        target="help_command.run_help",
    )
    help_command.add_argument("command", nargs="*", metavar="COMMAND", help="such as spend, or org put")
    help_command.suggestions["COMMAND"] = root.subcommands
