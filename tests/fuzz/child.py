"""One target under atheris, with libFuzzer's options behind its name: `run` starts this, and it ends its process."""

from __future__ import annotations

import sys

import atheris

# What is followed branch by branch: our own code, and the protocol libraries that are written in Python.
FOLLOWED = ["price_keeper", "hpack"]


def main(name: str, options: list[str]) -> None:
    with atheris.instrument_imports(include=FOLLOWED, enable_loader_override=False):
        from tests.fuzz.targets import target

        one = target(name)
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
