"""How long a newcomer takes to the first metered answer: the commands of docs/five-minutes.md, from a clone in an empty
folder, with nothing in the environment but PATH, HOME and what says where pip finds packages. Nothing that was
downloaded before is used again. Needs the ports 8080 and 8081.

Run as: make newcomer; with --write it writes what it finds into that page.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from bench.speed.machine import described
from tests.support.doc_pages import ROOT, Block, parse_blocks
from tests.support.output_matching import matches_json

PAGE = ROOT / "docs" / "five-minutes.md"
BEGIN, END = "<!-- newcomer: begin -->", "<!-- newcomer: end -->"
START_SECONDS = 600
SPENT = re.compile(r"^Total +1 ", re.MULTILINE)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME") or name.startswith("PIP_")}
    return {**kept, "PIP_NO_CACHE_DIR": "1"}


@contextmanager
def running(command: str, folder: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as sink:
        process = subprocess.Popen(
            ["sh", "-ec", command], cwd=folder, env=environment(), stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C
        process.wait(60)


def until_told(process: subprocess.Popen[bytes], output: Path, words: str) -> str:
    until = time.monotonic() + START_SECONDS
    while words not in output.read_text():
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"it did not start:\n{output.read_text()}")
        time.sleep(0.05)
    return output.read_text()


def typed(script: str, folder: Path) -> str:
    done = subprocess.run(
        ["sh", "-ec", script], cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode:
        sys.exit(f"{script}\n{done.stdout}{done.stderr}")
    return done.stdout


def found(folder: Path) -> Mapping[str, float]:
    """Seconds by what they were taken for."""
    clone, start, path, call, *others = (block for block in parse_blocks(PAGE) if block.language == "sh")
    cost = next(block for block in others if "price-keeper spend" in block.text)
    marks = [time.monotonic()]
    typed(clone.text.replace("REPOSITORY", shlex.quote(str(ROOT))), folder)
    here = folder / "price-keeper"
    marks.append(time.monotonic())
    output = folder / "output"
    with running(start.text, here, output) as process:
        installed = _when(here / ".venv" / ".run", process)
        told = until_told(process, output, "AWS_CONTAINER_AUTHORIZATION_TOKEN")
        marks += [installed, time.monotonic()]
        pasted = told.partition("Paste into another shell:\n\n")[2].partition("\n\n")[0]
        before = f"{pasted}\n{path.text}\n"
        _check(call, typed(before + call.text, here))
        marks.append(time.monotonic())
        while not SPENT.search(typed(before + cost.text, here)):
            if time.monotonic() - marks[-1] > 60:
                sys.exit("nothing was spent")
        marks.append(time.monotonic())
    names = ("clone", "install, as `make run` does it once", "start", "first answer", "its cost is told")
    return {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}


def _when(path: Path, process: subprocess.Popen[bytes]) -> float:
    """The moment at which a file comes to be."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)
    return time.monotonic()


def _check(call: Block, printed: str) -> None:
    if call.expected_output is None or not matches_json(call.expected_output.text, printed):
        sys.exit(f"this is no answer: {printed}")


def told(seconds: Mapping[str, float]) -> str:
    answered = sum(list(seconds.values())[:4])
    rows = [f"| {name} | {taken:.1f} |" for name, taken in seconds.items()]
    where = f"{datetime.now(UTC):%d %B %Y}, {described()}"
    return "\n".join(
        [
            f"| {where} | seconds |",
            "|---|---|",
            *rows,
            f"| **from nothing to the first metered answer** | **{answered:.1f}** |",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="what was found into the page")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = told(found(Path(folder)))
    print(table)
    if arguments.write:
        text = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table}\n{END}", PAGE.read_text(), flags=re.DOTALL)
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
