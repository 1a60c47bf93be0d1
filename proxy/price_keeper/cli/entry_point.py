"""The console script `price-keeper`: parse the command line, load the module of the command, run it, report failures.

Exit codes: 0 done; 1 not done, or a check found something; 2 a mistake in the command or the configuration;
130 interrupted. With `--json` a failure is one line of JSON, the last line on standard error.

Only the declaration of the commands is imported here. The code of a command is imported when it runs, so that help,
completion and usage errors are fast.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module

from price_keeper.cli.command_parser import UsageError
from price_keeper.cli.hints import add_hint
from price_keeper.cli.root_parser import PROGRAM, build_root_parser
from price_keeper.cli.terminal import RED, paint
from price_keeper.errors import ConfigError, PriceKeeperError
from price_keeper.workers import reload_signal

LONG_RUNNING_COMMANDS = ("serve_command.run_serve", "dev_command.run_dev")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    print_failure = _print_failure_as_json if "--json" in words else _print_failure
    try:
        return _flush_output(_run_command(build_root_parser().parse_args(words)))
    except UsageError as failure:
        return print_failure("usage", 2, [str(failure)], failure)
    except ConfigError as failure:
        return print_failure("mistake", 2, failure.problems, failure)
    except PriceKeeperError as failure:
        is_mistake = getattr(failure, "status", None) == 404  # the command names what the control API does not have
        kind, code = ("mistake", 2) if is_mistake else ("not_done", 1)
        return print_failure(kind, code, [add_hint(failure, words)], failure)
    except BrokenPipeError:
        return _handle_broken_pipe()
    except OSError as failure:
        return print_failure("not_done", 1, [str(failure)], failure)
    except BaseException as failure:
        if not _is_interrupt(failure):
            raise
        return print_failure("interrupted", 130, [], None)


def _is_interrupt(failure: BaseException) -> bool:
    """`asyncio.run` raises CancelledError if Ctrl-C comes right after it has begun to handle SIGINT (Python 3.11)."""
    asyncio = sys.modules.get("asyncio")  # whatever raised it has loaded it; loading it here takes time
    return isinstance(failure, KeyboardInterrupt) or (
        asyncio is not None and isinstance(failure, asyncio.CancelledError)
    )


def _run_command(args: Namespace) -> int:
    target = "version_command.run_version" if getattr(args, "version", False) else args.target
    if not target:  # a command with subcommands, named alone
        args.parser.print_help()
        return 2
    _prepare_process()
    if target in LONG_RUNNING_COMMANDS:
        reload_signal.record_reload_signals()
    return load_command(target)(args)


def load_command(target: str) -> Callable[[Namespace], int]:
    """Import the module of a command, without garbage collections, and without what aiohttp does when it is imported.

    Nearly everything that an import creates lives as long as the process. Collections would find next to nothing, and
    take an eighth of the time that `serve` needs to start; aiohttp's certificates a tenth.
    """
    module, _, function_name = target.partition(".")
    gc.disable()
    try:
        with _skip_default_authorities() if target in LONG_RUNNING_COMMANDS else nullcontext():
            command: Callable[[Namespace], int] = getattr(import_module(f"price_keeper.cli.{module}"), function_name)
        gc.freeze()  # or the first collection would scan all of it
    finally:
        gc.enable()
    return command


def _skip_default_authorities() -> AbstractContextManager[None]:
    from price_keeper.client_tls import skip_default_authorities

    return skip_default_authorities()


def _prepare_process() -> None:
    import logging
    import zoneinfo

    # Every sidecar of a fleet must agree on when a day ends, so the pinned tzdata package precedes the host's data.
    zoneinfo.reset_tzpath(to=())
    logging.getLogger("botocore").setLevel(logging.CRITICAL)  # failures are reported without a traceback


def _print_failure(_: str, code: int, problems: Sequence[str], failure: Exception | None) -> int:
    """Print one line for each problem: its place in a file, or the program's name, and what is wrong."""
    from price_keeper.config.config_problems import escape_line

    if isinstance(failure, UsageError):
        print(" ".join(failure.parser.format_usage().split()), file=sys.stderr)
    is_located = isinstance(failure, ConfigError) and failure.is_located
    for problem in problems:
        line = escape_line(problem)
        location, colon, explanation = (line if is_located else f"{PROGRAM}: {line}").partition(": ")
        print(paint(location + colon, "" if " " in location else RED, sys.stderr) + explanation, file=sys.stderr)
    if isinstance(failure, UsageError):
        print(f"For more, run: {failure.parser.prog} --help", file=sys.stderr)
    return code


def _print_failure_as_json(kind: str, code: int, problems: Sequence[str], failure: Exception | None) -> int:
    """Print the failure as one line, the last one on standard error; log lines may precede it."""
    import json

    record = {"error": kind, "message": "; ".join(problems), "details": list(problems), "exit_code": code}
    status = getattr(failure, "status", None)
    print(json.dumps(record if status is None else {**record, "status": status}), file=sys.stderr)
    return code


def _handle_broken_pipe() -> int:
    """The reader has closed the pipe: discard the rest of the output, so that the final flush cannot fail."""
    import os

    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _flush_output(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as failure:
        print(f"{PROGRAM}: cannot write the output: {failure.strerror}", file=sys.stderr)
        return 1
    return code
