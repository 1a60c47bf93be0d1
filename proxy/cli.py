"""The command line: `price-keeper`.

Exit codes: 0 done; 1 not done, or a check found something; 2 a mistake in the command or the configuration.
"""

from __future__ import annotations

import logging
import sys
import zoneinfo
from argparse import ArgumentParser
from collections.abc import Sequence

from proxy.commands import (
    app,
    audit,
    check_config,
    dev,
    doctor,
    keys,
    org,
    override,
    replay,
    rotate,
    run,
    session,
    spend,
    tables,
)
from proxy.commands import token as token_command
from proxy.commands.version import Version
from proxy.config.problems import one_line
from proxy.errors import ConfigError, PriceKeeperError

GROUPS = (
    dev,
    run,
    check_config,
    doctor,
    tables,
    org,
    app,
    override,
    audit,
    spend,
    token_command,
    rotate,
    session,
    replay,
    keys,
)


def main(arguments: Sequence[str] | None = None) -> int:
    # Every sidecar of a fleet must agree where a day ends, so the locked zone data go before the host's own.
    zoneinfo.reset_tzpath(to=())
    logging.getLogger("botocore").setLevel(logging.CRITICAL)  # its failures are told by us, without a traceback
    chosen = _parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except ConfigError as failure:
        for problem in failure.problems:
            print(one_line(problem), file=sys.stderr)
        return 2
    except PriceKeeperError as failure:
        print(f"price-keeper: {one_line(str(failure))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        return 1
    except OSError as failure:
        print(f"price-keeper: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _flushed(code)


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as failure:
        print(f"price-keeper: cannot write the output: {failure.strerror}", file=sys.stderr)
        return 1
    return code


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="price-keeper", description="Keeps every org and app on Amazon Bedrock inside its budget."
    )
    parser.add_argument("--version", action=Version, nargs=0, help="which version this is, and whether it is compiled")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        group.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
