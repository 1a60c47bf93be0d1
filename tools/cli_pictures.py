"""Pictures of the command line for its documentation, each of a real run: `make cli-pictures`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.ansi_svg import picture
from tools.terminal import on_a_terminal

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "images"
SECONDS = 60
ACME = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
SETTINGS = {
    "org_name": "Acme",
    "timezone": "America/New_York",
    "quota_scope": "APP",
    "model_ordering": ["premium", "standard", "economy"],
    "quotas": {"premium": 10_000_000, "standard": 5_000_000, "economy": 2_000_000},
}
MISTAKEN = """\
listen: {dta: 127.0.0.1:8080}
store: {engine: oracle}
labels:
  premium: {model: amazon.nova-pro-v1:0, format: nova, prices_usd_per_1m: {input: 0.80, outptu: 3.20}}
"""
CALLS = (("premium", 7), ("standard", 4), ("economy", 9))


@contextmanager
def development(folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """`price-keeper dev`, and what it tells when it is ready."""
    words = [sys.executable, "-m", "price_keeper.cli", "dev", "--port", "0", "--control-port", "0", "--json"]
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            yield json.loads(run.stdout.readline())
        finally:
            run.terminate()
            run.wait(SECONDS)


def _call(data: str, token: str, label: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"text": "Tell me a story of a house by the sea. " * 40}]}]}
    request = urllib.request.Request(f"{data}/model/{label}/converse", json.dumps(body).encode())
    request.add_header("authorization", f"Bearer {token}")
    request.add_header("content-type", "application/json")
    urllib.request.urlopen(request, timeout=SECONDS).read()


def taken() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The name of each picture; its commands, and what each printed."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)

        def run(command: str, *more: str) -> tuple[str, str]:
            words = [sys.executable, "-m", "price_keeper.cli", *command.split()[1:], *more]
            return command, on_a_terminal(words, folder, environment).text

        (folder / "config.yaml").write_text(MISTAKEN)
        (folder / "acme.yaml").write_text(json.dumps(SETTINGS))
        yield "demo", [run("price-keeper demo")]
        yield "help", [run("price-keeper")]
        yield "mistakes", [run("price-keeper check-config"), run("price-keeper spend --jsno")]
        with development(folder, environment) as ready:
            for label, times in CALLS:
                for _ in range(times):
                    _call(ready["data"], ready["environment"]["AWS_SESSION_TOKEN"], label)
            environment["PRICE_KEEPER_API_URL"] = ready["control"]
            environment["PRICE_KEEPER_API_KEY"] = Path(ready["admin_key_file"]).read_text().strip()
            run(f"price-keeper org put {ACME} acme.yaml")
            yield "org", [run("price-keeper org show Acme")]
            ports = [ready[name].rpartition(":")[2] for name in ("data", "control")]
            found = run("price-keeper doctor --data-dir data", "--port", ports[0], "--control-port", ports[1])
            yield "doctor", [found]
        # It flushes what it has when it ends.
        yield "spend", [run("price-keeper spend --data-dir data")]


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, typed in taken():
        (PICTURES / f"cli-{name}.svg").write_text(picture(typed))


if __name__ == "__main__":
    main()
