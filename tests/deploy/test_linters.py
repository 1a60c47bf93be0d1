"""What the tools of those who deploy say: hadolint, and the schemas of Kubernetes and Compose."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.commands import ROOT
from tests.support.deploy_tools import DEPLOY, MANIFESTS, Document, run_tool, tool

# The oldest with native sidecars by itself, and the newest that the schemas know.
VERSIONS = ("1.29", "1.37")


def test_dockerfile_passes_lint() -> None:
    assert run_tool(tool("hadolint"), ROOT / "Dockerfile") == ""


def test_compose_accepts_its_files() -> None:
    files = sorted(DEPLOY.glob("docker-compose*.yaml"))
    run_tool(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_all_manifests(found: list[Document], version: str, tmp_path: Path) -> None:
    known = [each for each in found if not each["apiVersion"].startswith("monitoring.coreos.com/")]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(known))
    run_tool(tool("kubernetes-validate"), "--strict", "-k", version, path)


def test_kubernetes_accepts_each_manifest() -> None:
    whole = [each for each in MANIFESTS if "ephemeral" not in each.name]  # which is a patch
    run_tool(tool("kubernetes-validate"), "--strict", *whole)
