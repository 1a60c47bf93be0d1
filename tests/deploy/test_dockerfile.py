"""The Dockerfile, read without carrying it out; `test_image_root.py` carries it out."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from subprocess import run

import pytest

from tests.support.commands import ROOT
from tests.support.image import is_sent, parsed

TEXT = (ROOT / "Dockerfile").read_text()
BEFORE, STAGES = parsed(TEXT)
FINAL = STAGES[-1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def steps(word: str) -> list[str]:
    return [rest for known, rest in FINAL.steps if known == word]


def test_every_stage_uses_same_tagged_slim_base() -> None:
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", BEFORE["BASE"])
    assert {stage.base for stage in STAGES} == {"${BASE}"}


def test_last_stage_installs_nothing() -> None:
    assert not any(re.search(r"apt|pip|gcc", each) for each in steps("RUN"))
    assert all(each.startswith("--from=") for each in steps("COPY"))


def test_packages_are_installed_by_hash_only() -> None:
    installs = re.findall(r"pip [^&\n]*install[^&\n]*", TEXT)
    assert installs
    for each in installs:
        assert "--require-hashes" in each or "--no-deps dist/" in each or "uninstall" in each, each


def test_image_is_compiled_by_default() -> None:
    defaults = [rest for stage in STAGES for word, rest in stage.steps if word == "ARG" and "COMPILED" in rest]
    assert defaults == ["COMPILED=1"]


def pins(name: str) -> set[str]:
    return set(re.findall(r"^[a-z0-9][a-z0-9.-]*==\S+", (ROOT / "requirements" / name).read_text(), re.MULTILINE))


def test_installed_versions_are_those_tested() -> None:
    assert pins("run.lock") < pins("build.lock") < pins("dev.lock")


def test_image_user_is_numeric_and_non_root() -> None:
    (user,) = steps("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)
    kept = next(each for each in steps("RUN") if "install -d" in each)
    assert "-o {} -g {}".format(*user.split(":")) in kept
    assert steps("VOLUME") == [kept.split()[-1]] == steps("WORKDIR")


def test_image_version_matches_project() -> None:
    assert f"VERSION={VERSION}" in steps("ARG")


@pytest.mark.parametrize(
    "name", ["proxy/price_keeper/app.py", "proxy/price_keeper/py.typed", "requirements/run.lock", "setup.py", "LICENSE"]
)
def test_build_context_has_what_build_needs(name: str) -> None:
    assert (ROOT / name).is_file()
    assert is_sent(name, ROOT)


@pytest.mark.parametrize(
    "name",
    [".git/config", ".venv/bin/python", "data/token-key", "tests/conftest.py",
     "proxy/price_keeper/__pycache__/app.cpython-311.pyc",
     "proxy/price_keeper/handler.cpython-311-x86_64-linux-gnu.so", "deploy/docker/config.yaml", "config.yaml", ".env"],
)  # fmt: skip
def test_build_context_has_nothing_else(name: str) -> None:
    assert not is_sent(name, ROOT)


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Probe(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Probe)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def healthcheck(probe: str) -> int:
    (step,) = steps("HEALTHCHECK")
    command = json.loads(step.partition("CMD ")[2])
    environment = {"PRICE_KEEPER_PROBE": probe, "PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin"}
    return run(command, env=environment, capture_output=True, timeout=20).returncode


def test_healthcheck_distinguishes_healthy_from_dead() -> None:
    with answering(200) as probe:
        assert healthcheck(probe) == 0
    assert healthcheck(probe) == 1
    with answering(503) as probe:
        assert healthcheck(probe) == 1
    (variable,) = [each for each in steps("ENV") if "PRICE_KEEPER_PROBE" in each]
    assert "PRICE_KEEPER_PROBE=127.0.0.1:8081" in variable  # the control port, if a configuration names no other
