"""Runs the simulator as a separate process: `bedrock-simulator --port 9000`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from bedrock_simulator.server import simulated_bedrock
from bedrock_simulator.signatures import DEFAULT_KEYS, Keys


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bedrock-simulator", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, is any free port; the first line tells it")
    parser.add_argument("--access-key", default=DEFAULT_KEYS.access_key)
    parser.add_argument("--secret-key", default=DEFAULT_KEYS.secret_key)
    parser.add_argument("--session-token", help="then the key pair is temporary, and this has to come along")
    parser.add_argument("--api-key", default=DEFAULT_KEYS.bearer, help="accepted as Authorization: Bearer")
    parser.add_argument("--region", help="that signatures have to name; any, unless given")
    parser.add_argument("--no-auth", action="store_true", help="answer everyone")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="append what arrives and what became of it")
    parser.add_argument("--min-cache-tokens", type=int, default=1024, help="shorter prefixes are not cached")
    return parser.parse_args(argv)


async def _serve(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # on Windows, where Ctrl-C ends the process
            loop.add_signal_handler(name, stopped.set)
    async with simulated_bedrock(
        arguments.host,
        arguments.port,
        keys=Keys(
            arguments.access_key, arguments.secret_key, arguments.session_token, arguments.api_key, arguments.region
        ),
        require_auth=not arguments.no_auth,
        ledger_file=arguments.ledger,
        region=arguments.region or "us-east-1",
        min_cache_tokens=arguments.min_cache_tokens,
    ) as bedrock:
        print(f"simulated Bedrock on {bedrock.url}", flush=True)
        await stopped.wait()


def main(argv: list[str] | None = None) -> None:
    arguments = _parse_arguments(sys.argv[1:] if argv is None else argv)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(arguments))
    else:
        uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
