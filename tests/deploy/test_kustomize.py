"""The patch by which Kustomize adds the sidecar to any Deployment. `test_kustomize_build.py` applies it."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.deploy_tools import (
    DEPLOY,
    assert_good_config,
    documents,
    filter_kind,
    find_product_container,
    manifest,
)

FOLDER = DEPLOY / "kustomize"
PATCH, BASE = FOLDER / "sidecar-patch.yaml", FOLDER / "base.yaml"


def test_patch_adds_the_sidecar_of_the_manifests() -> None:
    (patch,), (deployment,) = documents(PATCH.read_text()), filter_kind(manifest("sidecar.yaml"), "Deployment")
    added, pod = patch["spec"]["template"]["spec"], deployment["spec"]["template"]["spec"]
    container, expected = find_product_container(added | {"containers": []}), find_product_container(pod)
    own = container["securityContext"]
    of_pod = {name: value for name, value in pod["securityContext"].items() if not name.startswith("fsGroup")}
    assert own == of_pod | expected["securityContext"]  # of its own, since the pod's are the app's
    assert container | {"securityContext": None} == expected | {"securityContext": None}
    assert added["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"]
    assert patch["spec"]["template"]["metadata"]["labels"] == {"price-keeper": "sidecar"}


def test_configuration_is_accepted_and_mounted(tmp_path: Path) -> None:
    assert_good_config((FOLDER / "config.yaml").read_text(), tmp_path)
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (generated,) = kustomization["configMapGenerator"]
    (patch,) = documents(PATCH.read_text())
    volumes = {each["name"]: each for each in patch["spec"]["template"]["spec"]["volumes"]}
    assert volumes["price-keeper-config"]["configMap"]["name"] == generated["name"]
    assert generated["files"] == ["config.yaml"]


def test_target_is_what_is_labelled() -> None:
    (patch,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["patches"]
    name, _, value = patch["target"]["labelSelector"].partition("=")
    found = documents(BASE.read_text())
    assert [each["metadata"].get("labels", {}).get(name) == value for each in found] == [True, False]
    assert patch["path"] == PATCH.name
