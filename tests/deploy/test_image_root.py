"""The Dockerfile carried out (`tests/support/image.py`), and the result run as Docker would run it: as its own
user, without a capability, on a read-only root. Bedrock is simulated, as in the compose file for it.

This takes minutes and installs packages, so `make test` leaves it out: `make test-deploy`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import ROOT
from tests.support.deploy_tools import DEPLOY, SECONDS, tool
from tests.support.image import PLACE, Builder, Image, added_paths, why_unavailable
from tests.support.ports import free_port
from tests.support.workers import children

USER = "10001"
VOLUME = "/var/lib/price-keeper"
SITE = "opt/price-keeper/lib"

# Its mounts are seen by what it runs alone.
_RUN = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"
mount --bind "$2" "$1$3"
mount --bind "$4" "$1/etc/price-keeper/config.yaml"
mount -t proc proc "$1/proc"
root=$1
shift 4
exec chroot "$root" /usr/bin/setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs \
  --inh-caps=-all --bounding-set=-all -- /bin/sh -c 'cd /var/lib/price-keeper && exec "$@"' sh "$@"
"""


def compose(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())["services"]["sidecar"]
    return found


@pytest.fixture(scope="module", params=["0", "1"], ids=["pure", "compiled"])
def image(request: pytest.FixtureRequest) -> Image:
    assert why_unavailable() == ""
    made = Builder(ROOT / "Dockerfile", PLACE, {"COMPILED": request.param, "REVISION": "1234567"}).build()
    config = made.root / "etc/price-keeper/config.yaml"  # where Docker would mount it
    config.parent.mkdir()
    config.touch()
    return made


@dataclass
class Contained:
    """The image running, with a volume of its own."""

    image: Image
    volume: Path
    environment: dict[str, str]

    def command(self, *command: str) -> list[str]:
        config = str(DEPLOY / "docker" / "config.yaml")
        arguments = [str(self.image.root), str(self.volume), VOLUME, config, *command]
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", _RUN, "sh", *arguments]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*command), env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )


@pytest.fixture
def contained(image: Image, tmp_path: Path) -> Contained:
    volume = tmp_path / "volume"
    volume.mkdir(mode=0o700)
    os.chown(volume, int(USER), int(USER))
    data, control = free_port(), free_port()
    given = {name: str(value) for name, value in compose("docker-compose.simulated.yaml")["environment"].items()}
    ports = {
        "PRICE_KEEPER__LISTEN__DATA": f"127.0.0.1:{data}",
        "PRICE_KEEPER__LISTEN__CONTROL": f"127.0.0.1:{control}",
        "PRICE_KEEPER_PROBE": f"127.0.0.1:{control}",
    }
    return Contained(image, volume, {**image.variables, "HOME": "/", **given, **ports})


@contextmanager
def serving(contained: Contained) -> Iterator[subprocess.Popen[str]]:
    command = contained.command(*contained.image.entry, *compose("docker-compose.yaml")["command"])
    with subprocess.Popen(
        command, env=contained.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready(contained):
                assert process.poll() is None, process.stdout and process.stdout.read()
                assert time.monotonic() < deadline, "it does not get ready"
                time.sleep(0.1)
            yield process
        finally:
            # A process that changes its user gets no parent-death signal, so --kill-child alone leaves it running.
            for inside in children(process.pid):
                os.kill(inside, signal.SIGKILL)
            process.kill()


def ready(contained: Contained) -> bool:
    try:
        return ask(contained, "CONTROL", "/ready")[0] == 200
    except OSError:
        return False


def ask(contained: Contained, port: str, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    url = f"http://{contained.environment[f'PRICE_KEEPER__LISTEN__{port}']}{path}"
    given = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, given, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.status, dict(answer.headers), json.loads(answer.read())


def first_inside(process: subprocess.Popen[str]) -> int:
    """Outside, the number of what is process 1 inside."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


def test_image_serves_drains_and_keeps_spend(contained: Contained) -> None:
    hello = {"messages": [{"role": "user", "content": [{"text": "Hello"}]}]}
    with serving(contained) as process:
        assert ask(contained, "CONTROL", "/health")[0] == 200
        status, headers, answer = ask(contained, "DATA", "/model/premium/converse", hello)
        assert (status, headers["x-price-keeper-label"]) == (200, "premium")
        assert answer["usage"]["outputTokens"] > 0
        inside = first_inside(process)
        found = Path(f"/proc/{inside}/status").read_text()
        assert re.search(rf"^Uid:\t{USER}\t{USER}\t{USER}\t{USER}$", found, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", found, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", found, re.MULTILINE)
        assert contained.run(*contained.image.healthcheck).returncode == 0
        os.kill(inside, signal.SIGTERM)
        assert process.wait(60) == 0  # as process 1, for which a signal has no default
    assert contained.run(*contained.image.healthcheck).returncode == 1
    spent = contained.run("price-keeper", "spend", "--config", "/etc/price-keeper/config.yaml", "--json")
    assert spent.returncode == 0, spent.stderr
    assert '"requests": 1' in spent.stdout
    owners = {each.stat().st_uid for each in contained.volume.rglob("*")}
    assert owners == {int(USER)}


_WRITES = """
import os, sys
places = [name for name in sys.argv[1:] if os.path.isdir(name)]
def can(place):
    try:
        open(os.path.join(place, "x"), "w").close()
    except OSError:
        return False
    return True
print([place for place in places if can(place)])
"""


def test_only_volume_is_writable(contained: Contained) -> None:
    places = ["/", "/etc", "/opt/price-keeper/bin", "/tmp", "/usr/bin", "/var/tmp", "/run", VOLUME]
    result = contained.run("python", "-c", _WRITES, *places)
    assert (result.stdout.strip(), result.returncode) == (str([VOLUME]), 0), result.stderr


def test_image_has_no_compiler(image: Image) -> None:
    folders = [image.root / name for name in ("bin", "usr/bin", "usr/local/bin", "opt/price-keeper/bin")]
    names = {each.name for folder in folders for each in folder.iterdir()}
    assert names & {"as", "c++", "cc", "clang", "g++", "gcc", "ld", "make", "mypyc"} == set()
    assert "price-keeper" in names


def locked(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)(?:\[.*\])?==(\S+)", text, re.MULTILINE))


def installed(contained: Contained) -> dict[str, str]:
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = json.loads(contained.run("/opt/price-keeper/bin/python", "-c", code).stdout)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found.items()}


def test_image_has_exactly_locked_packages(contained: Contained) -> None:
    found, known = installed(contained), locked("run.lock")
    assert found.pop("bedrock-price-keeper") == "0.2.0"
    assert {name: known.get(name) for name in found} == found
    assert known.keys() - found.keys() == {"setuptools"}  # which builds alone need
    files = set(added_paths(contained.image))
    assert not [name for name in files if re.search(r"/site-packages/(tests|bench|deploy)/", name)]
    assert not [name for name in files if name.endswith((".c", ".h")) and "/price_keeper/" in name]


def test_image_adds_only_build_output(contained: Contained) -> None:
    assert {name for name in added_paths(contained.image) if not name.startswith("opt/price-keeper")} == {
        "etc/price-keeper",
        "etc/price-keeper/config.yaml",
        "usr/share/price-keeper",
        "usr/share/price-keeper/sbom.cdx.json",
        "var/lib/price-keeper",
    }


def test_python_files_are_precompiled(contained: Contained) -> None:
    """They could not be written at the first start, on a read-only root."""
    code = "import price_keeper.app, sys; print([n for n, m in sys.modules.items() if getattr(m, '__cached__', None)])"
    assert "price_keeper.app" in contained.run("python", "-c", code).stdout
    sources = sorted((contained.image.root / SITE).rglob("price_keeper/**/*.py"))
    assert sources
    for each in sources:
        assert list((each.parent / "__pycache__").glob(f"{each.stem}.cpython-*.pyc")), each


def test_version_states_whether_compiled(contained: Contained, request: pytest.FixtureRequest) -> None:
    output = contained.run("price-keeper", "--version").stdout
    is_compiled = bool(list((contained.image.root / SITE).rglob("price_keeper/handler*.so")))
    assert output.endswith(", compiled\n") == is_compiled == (request.node.callspec.id == "compiled")


def test_bill_of_materials_lists_installed_packages(contained: Contained) -> None:
    path = contained.image.root / "usr/share/price-keeper/sbom.cdx.json"
    bill = json.loads(path.read_text())
    packages = {each["name"]: each["version"] for each in bill["components"] if each["purl"].startswith("pkg:pypi/")}
    ours = bill["metadata"]["component"]
    assert {**packages, ours["name"]: ours["version"]} == installed(contained)
    debian = {each["name"] for each in bill["components"] if each["purl"].startswith("pkg:deb/")}
    output = contained.run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").stdout
    assert debian == {line.split()[0] for line in output.splitlines() if line.endswith(" installed")}
    assert {each["ref"] for each in bill["dependencies"]} <= {each["bom-ref"] for each in (*bill["components"], ours)}


def test_bill_of_materials_is_valid(image: Image) -> None:
    code = (
        "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import "
        "JsonStrictValidator; print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read()))"
    )
    text = (image.root / "usr/share/price-keeper/sbom.cdx.json").read_text()
    done = subprocess.run(
        [tool("python"), "-c", code], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.returncode) == ("None", 0), done.stdout + done.stderr


def test_image_labels_describe_it(image: Image) -> None:
    labels = {name.rpartition(".image.")[2]: value for name, value in image.labels.items()}
    assert (labels["version"], labels["licenses"], labels["revision"]) == ("0.2.0", "Apache-2.0", "1234567")
    assert labels["base.name"].startswith("python:3.")
    assert image.volumes == [VOLUME]


def test_sample_app_is_served_through_image(contained: Contained) -> None:
    """With the boto3 of the image, and the environment of the compose file."""
    base = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())["services"]["app"]
    with serving(contained):
        shutil.copy(DEPLOY / "sample" / "app.py", contained.volume / "app.py")
        given = {name: str(value) for name, value in base["environment"].items()}
        given["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] = f"http://{contained.environment['PRICE_KEEPER__LISTEN__DATA']}"
        environment = {**contained.image.variables, **given}
        command = contained.command("python", f"{VOLUME}/app.py")
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("answered by premium, NORMAL")
                os.kill(first_inside(process), signal.SIGTERM)
                assert process.wait(20) == 0
            finally:
                process.kill()
