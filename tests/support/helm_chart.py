"""The chart as Helm renders it, by itself and as a dependency of a user's chart."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import yaml

from tests.support.deploy_tools import CHART, Document, documents, run_tool, tool

RELEASE = "spend"
LABELS = CHART / "ci" / "control-values.yaml"  # values with labels, without which nothing is rendered

# As docs/deployment.md has it: a pod of one's own, with the sidecar of the chart that it depends on.
_PARENT_POD = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: till}
spec:
  selector: {matchLabels: {app: till}}
  template:
    metadata: {labels: {app: till, price-keeper: sidecar}}
    spec:
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 60
      securityContext:
        {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
      initContainers:
        {{- include "price-keeper.sidecar" (index .Subcharts "price-keeper") | nindent 8 }}
      containers:
        - name: till
          image: till:1
          env:
            - {name: AWS_ENDPOINT_URL_BEDROCK_RUNTIME, value: "http://127.0.0.1:8080"}
          resources: {requests: {cpu: 10m, memory: 32Mi}, limits: {memory: 64Mi}}
          securityContext:
            {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      volumes:
        {{- include "price-keeper.sidecarVolumes" (index .Subcharts "price-keeper") | nindent 8 }}
"""


def render(values: str | Path, *more: str, chart: Path = CHART) -> list[Document]:
    path = values if isinstance(values, Path) else CHART / "ci" / f"{values}-values.yaml"
    return documents(_template(chart, path, more))


@cache
def _template(chart: Path, values: Path, more: tuple[str, ...]) -> str:
    return run_tool(tool("helm"), "template", RELEASE, chart, "-f", values, *more)


def render_refused(*more: str) -> str:
    """What Helm says to these."""
    return run_tool(tool("helm"), "template", RELEASE, CHART, "-f", LABELS, *more, code=1)


def write_parent_chart(folder: Path) -> list[Document]:
    chart = folder / "till"
    shutil.copytree(CHART, chart / "charts" / "price-keeper")
    (chart / "templates").mkdir()
    (chart / "Chart.yaml").write_text("{apiVersion: v2, name: till, version: 1.0.0}\n")
    (chart / "templates" / "till.yaml").write_text(_PARENT_POD)
    own = {"control": {"enabled": False}, "sidecar": {"enabled": True}}
    values = yaml.safe_load(LABELS.read_text())["config"]
    (chart / "values.yaml").write_text(yaml.safe_dump({"price-keeper": {"config": values, **own}}))
    return render(chart / "values.yaml", chart=chart)


def render_notes(folder: Path, values: str) -> str:
    """What Helm says after an installation, which it does not without a cluster: rendered as a template like others."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart)
    text = (chart / "templates" / "NOTES.txt").read_text()
    wrapped = f'{{{{- define "notes" -}}}}\n{text}{{{{- end }}}}\nnotes: {{{{ include "notes" . | quote }}}}\n'
    (chart / "templates" / "notes.yaml").write_text(f"kind: Notes\n{wrapped}")
    found = render(CHART / "ci" / f"{values}-values.yaml", "--show-only", "templates/notes.yaml", chart=chart)
    return str(found[0]["notes"])
