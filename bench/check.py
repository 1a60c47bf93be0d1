"""Whether the hot path has become slower: its instructions, counted by callgrind, against those of a fixed program.

Time passes by the request, not by the clock, so that as much of the work in the background falls to each of them as
under load, and two runs count the same to a few in a thousand. What is kept is a ratio, so that it means the same with
another build of the same Python.

A request over HTTP/1.1 is counted bare and with the headers that SDKs send, one over HTTP/2 with these headers, and of
a stream one frame.

    python -m bench.check                   fails when one of them takes a tenth more than is kept
    python -m bench.check --keep            keeps what they take now
    python -m bench.check request sdk       counts only these, in less time
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from price_keeper.clock import SystemClock

from bench import hotpath
from bench.speed.machine import found
from tests.support.clock import ManualClock

KEPT = Path(__file__).parent / "check.json"
TOLERATED = 0.10
SECONDS_A_TURN = hotpath.CONNECTIONS / 20_000  # as under such a load
WARM = 5
SECONDS_OF_BACKGROUND = 5.0  # for a first flush and the like
TURNS = {"request": 60, "sdk": 30, "stream": 4, "http2": 10}
ROUNDS = 50_000  # of the fixed program
SECONDS, TRIES = 600, 3  # now and then the loop stands still within callgrind, and nobody knows why
# A short one: callgrind's processor has no instructions for hashing, which of a long one would be half of everything.
QUESTION = b'{"messages":[{"role":"user","content":[{"text":"What is to be said?"}]}]}'
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


# ---------------------------------------------------------------- inside of callgrind


def work(names: Sequence[str]) -> None:
    """Dumps what each kind of traffic took, and then what the fixed program took."""
    clock = ManualClock(SystemClock().now())

    async def take_turns(wires: hotpath.Wires, asks: list[list[bytes]]) -> None:
        for each in asks:
            await wires.turn(each)
            await clock.advance(SECONDS_A_TURN)

    async def serve(wires: hotpath.Wires) -> None:
        await wires.open(hotpath.BARE)  # what is counted first is not to pay for what all of them need once
        await take_turns(wires, wires.asks(WARM))
        await clock.advance(SECONDS_OF_BACKGROUND)
        for name in names:
            await wires.open(hotpath.ALL[name])
            asks = wires.asks(WARM + TURNS[name])
            await take_turns(wires, asks[:WARM])
            gc.collect()
            _zero()
            await take_turns(wires, asks[WARM:])
            _dump()
        gc.collect()
        gc.disable()
        _zero()
        fixed_program()
        _dump()
        os._exit(0)  # a sidecar that drains waits for the clock, which stands still now

    hotpath.run(serve, clock, QUESTION)


# Functions of the C library that nothing else calls here: callgrind heeds them, and needs nobody who tells it.
ZERO, DUMP = "sched_get_priority_max", "sched_get_priority_min"


def _zero() -> None:
    os.sched_get_priority_max(os.SCHED_FIFO)


def _dump() -> None:
    os.sched_get_priority_min(os.SCHED_FIFO)


def fixed_program() -> int:
    """Some of all that a request is made of: calls, objects, look-ups, bytes. Never change it."""
    kept: dict[bytes, tuple[bytes, int]] = {}
    total = 0
    for number in range(ROUNDS):
        name = b"name-%d" % (number % 50)
        thing = SimpleNamespace(name=name, parts=[b"a", name, b"c"])
        joined = b"\r\n".join(thing.parts)
        kept[name] = (joined, len(joined))
        total += kept[name][1] + int(joined.startswith(b"a\r\n")) + len(str(number))
    return total


# ---------------------------------------------------------------- outside of it


def measured(callgrind: str, names: Sequence[str]) -> dict[str, float]:
    """How many rounds of the fixed program are as many instructions as each of these takes."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        heeded = (f"--zero-before={ZERO}", f"--dump-before={DUMP}")
        command = [callgrind, "--tool=callgrind", *heeded, f"--callgrind-out-file={counts}"]
        _counted([*command, sys.executable, "-m", "bench.check", "--within", *names], folder)
        *totals, fixed = (_total(counts.with_name(f"counts.{number}")) for number in range(1, len(names) + 2))
    round_instructions = fixed / ROUNDS
    answers = [TURNS[name] * hotpath.CONNECTIONS * hotpath.ALL[name].units for name in names]
    return {name: total / n / round_instructions for name, total, n in zip(names, totals, answers, strict=True)}


def _counted(command: Sequence[str], folder: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "0", "TMPDIR": folder}
    for number in range(TRIES):
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"callgrind did not end in {SECONDS} s, try {number + 1} of {TRIES}", flush=True)
            continue
        if done.returncode:
            raise SystemExit(f"callgrind did not count: {done.stderr[-2000:]}")
        return
    raise SystemExit("callgrind never ended")


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"callgrind's {dump.name} has no total")
    return int(found[1])


def checked(ratios: Mapping[str, float]) -> int:
    """1 if one of them is too much, or nothing is kept for it."""
    return max(_checked(name, ratio) for name, ratio in ratios.items())


def _checked(name: str, ratio: float) -> int:
    kept = _known().get(PYTHON, {}).get(name)
    taken = f"{hotpath.ALL[name].title} takes {ratio:.2f} rounds"
    if kept is None:
        print(f"{taken}; nothing is kept for CPython {PYTHON}: python -m bench.check --keep")
        return 1
    change = ratio / kept - 1
    print(f"{taken}; kept is {kept:.2f}: {change:+.1%}, and up to {TOLERATED:+.0%} is let pass")
    return int(change > TOLERATED)


def keep(ratios: Mapping[str, float]) -> None:
    rounded = {name: round(ratio, 2) for name, ratio in ratios.items()}
    known = _known()
    KEPT.write_text(json.dumps(known | {PYTHON: known.get(PYTHON, {}) | rounded}, indent=2, sort_keys=True) + "\n")


def _known() -> dict[str, dict[str, float]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", choices=[[], *hotpath.ALL], metavar="NAME", help=", ".join(hotpath.ALL))
    options.add_argument("--keep", action="store_true")
    options.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    names = chosen.names or list(hotpath.ALL)
    if chosen.within:
        work(names)
    callgrind = found("valgrind")
    if callgrind is None:
        print("valgrind is not here, so the instructions of the hot path are not counted (Debian's package valgrind)")
        return 0
    ratios = measured(callgrind, names)
    if chosen.keep:
        keep(ratios)
    return checked(ratios)


if __name__ == "__main__":
    sys.exit(main())
