"""What is deployed, read as those read it who deploy it, and the tools for it, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import ROOT, call_in_process

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").rglob("*.yaml"))
CHART = DEPLOY / "helm" / "price-keeper"
TOOLS = ROOT / ".venv" / "deploy" / "bin"
IS_REQUESTED = "PRICE_KEEPER_TEST_DEPLOY" in os.environ  # by `make test-deploy`
SECONDS = 300

Document = dict[str, Any]


def tool(name: str) -> str:
    path = shutil.which(name, path=str(TOOLS))
    assert path is not None, f"{name} is not in {TOOLS}; make test-deploy installs it"
    return path


def run_tool(*command: str | Path, code: int = 0) -> str:
    completed = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert completed.returncode == code, f"{command}: {completed.stdout}{completed.stderr}"
    return completed.stdout if code == 0 else completed.stdout + completed.stderr


def documents(text: str) -> list[Document]:
    return [each for each in yaml.safe_load_all(text) if each]


def manifest(name: str) -> list[Document]:
    return documents((DEPLOY / "kubernetes" / name).read_text())


def filter_kind(documents_found: list[Document], *kinds: str) -> list[Document]:
    return [each for each in documents_found if each["kind"] in kinds]


def pods(documents_found: list[Document]) -> Iterator[Document]:
    """The spec of each pod that these make."""
    for each in documents_found:
        if each["kind"] == "Pod":
            yield each["spec"]
        elif "template" in each.get("spec", {}):
            yield each["spec"]["template"]["spec"]


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def find_product_container(pod: Document) -> Document:
    """The container that runs price-keeper."""
    (found,) = [each for each in containers(pod) if "serve" in each.get("args", [])]
    return found


def assert_good_config(text: str, folder: Path, **environment: str) -> None:
    (folder / "config.yaml").write_text(text)
    completed = call_in_process("check-config", folder=folder, **environment)
    assert (completed.returncode, completed.stderr) == (0, ""), completed.stderr
