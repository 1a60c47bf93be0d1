"""A client that lives on: one call for each line of standard input, one line about each. By the name of its program."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import telling


def main() -> None:
    program = import_module(sys.argv[1])
    describe = getattr(program, "describe", telling.described)
    call = None
    for line in sys.stdin:
        operation, arguments = json.loads(line)
        try:
            call = call or program.opened({})
            outcome = {"answer": call(operation, arguments)}
        except Exception as failure:
            outcome = {"error": describe(failure)}
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
