"""Each file that `make dist` makes, installed by pip and by pipx into an environment that has nothing else, and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.support.commands import ROOT, wait_for_startup
from tools.release import read_version

DIST = ROOT / "dist"
VERSION = read_version(ROOT)
KINDS = ("sdist", "pure", "compiled")
SECONDS = 900
PIPX = ROOT / ".venv" / "deploy" / "bin" / "pipx"


def find_file(kind: str) -> Path:
    pattern = {"sdist": "*.tar.gz", "pure": "*-none-any.whl", "compiled": "*-cp*.whl"}[kind]
    (found,) = DIST.glob(pattern)
    return found


def run(*command: str | Path, **environment: str) -> str:
    """Without anything of this checkout: an empty folder, and nothing of the environment that leads here."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PRICE"))}
    words = [str(each) for each in command]
    done = subprocess.run(
        words, cwd="/", env=own | environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session", params=KINDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`price-keeper` in a fresh environment."""
    place = tmp_path_factory.mktemp(request.param)
    run(sys.executable, "-m", "venv", place)
    run(place / "bin" / "pip", "install", "--quiet", f"{find_file(request.param)}[dynamodb,otel]")
    return place / "bin" / "price-keeper"


def test_program_states_version_and_build(program: Path, request: pytest.FixtureRequest) -> None:
    build = "compiled" if request.node.callspec.params["program"] == "compiled" else "pure Python"
    assert run(program, "--version").strip().endswith(f"{VERSION}, {build}")


def test_extras_are_installed(program: Path) -> None:
    run(program.parent / "python", "-c", "import aioboto3, opentelemetry.sdk, price_keeper.telemetry.tracing")


def test_program_serves_a_call(program: Path, tmp_path: Path) -> None:
    """And the status page, whose files are no Python."""
    out, errors = tmp_path / "out", tmp_path / "err"
    command = [program, "dev", "--port", "0", "--control-port", "0"]
    with out.open("wb") as output, errors.open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=log)
    try:
        started = wait_for_startup(process, out, errors)
        data, control, token = (
            re.findall(rf"\b{name}=(\S+)", started)[0]
            for name in ("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "PRICE_KEEPER_API_URL", "AWS_SESSION_TOKEN")
        )
        body = json.dumps({"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        with urlopen(Request(f"{data}/model/premium/converse", body, headers), timeout=60) as answer:
            assert answer.headers["x-price-keeper-label"] == "premium"
        with urlopen(f"{control}/status", timeout=60) as page:
            assert b"<html" in page.read()
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_pipx_installs_the_commands(kind: str, tmp_path: Path) -> None:
    places = {"PIPX_HOME": str(tmp_path / "home"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    run(PIPX, "install", "--python", sys.executable, f"{find_file(kind)}[dynamodb,otel]", **places)
    assert VERSION in run(tmp_path / "bin" / "price-keeper", "--version")
    assert sorted(each.name for each in (tmp_path / "bin").iterdir()) == ["bedrock-simulator", "price-keeper"]


def names(path: Path) -> set[str]:
    if path.suffix == ".whl":
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_product_and_nothing_else(kind: str) -> None:
    found = names(find_file(kind))
    assert not [name for name in found if name.startswith(("tests/", "bench/", "deploy/", "proxy/tests"))]
    assert any(name.endswith("price_keeper/control/page/files/budgets.js") for name in found)
    assert any(name.endswith("LICENSE") for name in found)
    assert any(name.endswith(".so") for name in found) == (kind == "compiled")
