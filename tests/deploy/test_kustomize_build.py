"""The patch for any Deployment, applied by the Kustomize that Debian has: the sidecar comes beside what is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.test_kustomize import BASE, FOLDER, PATCH
from tests.support.commands import ROOT
from tests.support.deploy_tools import Document, documents, filter_kind, find_product_container, run_tool, tool

KUBECTL = ROOT / "build" / "kubectl"


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """Debian's, whose Kustomize is 2.0.3: it takes patches by name, and no `target`."""
    program = KUBECTL / "usr" / "bin" / "kubectl"
    if not program.exists():
        KUBECTL.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "kubernetes-client"], cwd=KUBECTL, check=True, capture_output=True)
        (package,) = KUBECTL.glob("kubernetes-client_*.deb")
        subprocess.run(["dpkg", "-x", package, KUBECTL], check=True, capture_output=True)
    return program


@pytest.fixture
def made(kubectl: Path, tmp_path: Path) -> list[Document]:
    folder = tmp_path / "kustomize"
    shutil.copytree(FOLDER, folder)
    (folder / PATCH.name).write_text(PATCH.read_text().replace("name: any ", "name: till "))
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    del kustomization["patches"]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization | {"patchesStrategicMerge": [PATCH.name]}))
    return documents(run_tool(kubectl, "kustomize", folder))


def test_sidecar_is_added_beside_what_is_there(made: list[Document]) -> None:
    before = {each["metadata"]["name"]: each for each in documents(BASE.read_text())}
    after = {each["metadata"]["name"]: each for each in filter_kind(made, "Deployment")}
    assert after["reports"] == before["reports"]
    pod, was = (each["till"]["spec"]["template"]["spec"] for each in (after, before))
    assert pod["containers"] == was["containers"]
    assert [each["name"] for each in pod["initContainers"]] == ["price-keeper", "migrate"]  # which may call models
    assert find_product_container(pod)["restartPolicy"] == "Always"
    assert after["till"]["spec"]["template"]["metadata"]["labels"] == {"app": "till", "price-keeper": "sidecar"}
    (config,) = filter_kind(made, "ConfigMap")
    assert {"name": "price-keeper-config", "configMap": {"name": config["metadata"]["name"]}} in pod["volumes"]


def test_kubernetes_accepts_what_is_made(made: list[Document], tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(made))
    run_tool(tool("kubernetes-validate"), "--strict", "-k", "1.29", path)
