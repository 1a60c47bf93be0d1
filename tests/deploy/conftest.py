"""What is deployed. What takes tools or minutes is a run of its own: `make test-deploy`."""

from __future__ import annotations

import pytest

from tests.support.deploy_tools import IS_REQUESTED, Document, manifest
from tests.support.helm_chart import render, write_parent_chart

_REQUESTED_ONLY = (
    "test_chart.py",
    "test_image_root.py",
    "test_kustomize_build.py",
    "test_linters.py",
    "test_production.py",
)
collect_ignore = [] if IS_REQUESTED else [*_REQUESTED_ONLY]

_PLAIN = ("sidecar.yaml", "sidecar-config.yaml", "control.yaml", "control-config.yaml")
_OF_CHART = (
    ("chart default", "chart control", "chart everything", "chart both", "chart below another") if IS_REQUESTED else ()
)


@pytest.fixture(scope="session", params=("plain", "persistent", *_OF_CHART))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """All that one way to deploy gives to Kubernetes."""
    plain = [each for name in _PLAIN for each in manifest(name)]
    if request.param == "plain":
        return plain
    if request.param == "persistent":
        rest = [each for each in plain if (each["kind"], each["metadata"]["name"]) != ("Deployment", "sample-app")]
        return rest + manifest("variants/journal-persistent.yaml")
    name = request.param.removeprefix("chart ")
    return write_parent_chart(tmp_path_factory.mktemp("chart")) if name == "below another" else render(name)
