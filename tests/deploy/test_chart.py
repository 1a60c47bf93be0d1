"""The Helm chart: linted, refusing what is wrong, and making what its values say. See `test_kubernetes.py` too."""

from __future__ import annotations

import json
import re
import tomllib
from base64 import b64decode
from pathlib import Path

import pytest
import yaml
from price_keeper.auth.signing_keys import KeyConfig, load_keys

from tests.support.commands import ROOT
from tests.support.deploy_tools import CHART, filter_kind, find_product_container, manifest, pods, run_tool, tool
from tests.support.helm_chart import LABELS, render, render_notes, render_refused

VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
RULES = """\
groups:
  - name: spend
    rules:
      - alert: Unflushed
        expr: price_keeper_unflushed_seconds > 120
        annotations: {summary: "{{ $labels.pod }} waits"}
"""


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_chart_passes_lint(values: Path) -> None:
    output = run_tool(tool("helm"), "lint", "--strict", "--quiet", CHART, "-f", values)
    assert "ERROR" not in output
    assert "WARNING" not in output


def test_chart_version_matches_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml"):
        assert set(re.findall(r"price-keeper:(\d\S+)", path.read_text())) <= {version}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("control.replica=3", "replica"),
        ("control.replicas=0", "replicas"),
        ("standalone.role=control", "standalone.role"),
        ("standalone.workers=65", "workers"),
        ("image.digest=latest", "digest"),
        ("config.lables.x=1", "lables"),
        ("control.ingress.tlsSecret=", "control.ingress.tlsSecret: secrets travel there"),
        ("prometheusRule.enabled=true", "prometheusRule.rules: name a file"),
    ],
)
def test_invalid_values_are_refused_and_named(given: str, message: str) -> None:
    assert message in render_refused("--set", given).replace("standalone/role", "standalone.role")


def test_chart_without_values_has_the_labels_that_policies_allow() -> None:
    """The labels of deploy/kubernetes; tests/deploy/test_iam.py compares the policies with them."""
    plain = manifest("sidecar-config.yaml")[0]["data"]["config.yaml"]
    (made,) = filter_kind(render("default"), "ConfigMap")
    assert yaml.safe_load(made["data"]["config.yaml"])["labels"] == yaml.safe_load(plain)["labels"]


def test_own_labels_replace_those_of_the_chart() -> None:
    (made, *_) = filter_kind(render("both"), "ConfigMap")
    assert list(yaml.safe_load(made["data"]["config.yaml"])["labels"]) == ["economy"]


def test_chart_without_secret_makes_keys_that_are_accepted(tmp_path: Path) -> None:
    found = render("default")
    (secret,) = filter_kind(found, "Secret")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (pod, *_) = pods(found)
    assert {"name": "keys", "secret": {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}} in pod[
        "volumes"
    ]
    for name, value in secret["data"].items():
        (tmp_path / name).write_bytes(b64decode(value))
    (key,) = load_keys([KeyConfig("k1", "EdDSA", private_key_file=str(tmp_path / "k1.pem"))], {})
    assert key.signs_with is not None
    assert re.fullmatch("[A-Za-z0-9]{48}", (tmp_path / "api-key").read_text())


def test_named_secret_is_used_and_none_made() -> None:
    found = render("default", "--set", "control.existingSecret=mine")
    assert filter_kind(found, "Secret") == []
    (volume,) = [each for each in next(pods(found))["volumes"] if each["name"] == "keys"]
    assert volume["secret"]["secretName"] == "mine"


def test_own_secret_of_the_chart_that_is_named_is_not_made_anew() -> None:
    """`helm template` and Argo CD cannot look it up, so each rendering would have other keys."""
    (made,) = filter_kind(render("default"), "Secret")
    named = render("default", "--set", f"control.existingSecret={made['metadata']['name']}")
    assert filter_kind(named, "Secret") == []


def test_values_of_version_0_1_render_the_default_policy_and_monitor() -> None:
    """`helm upgrade --reuse-values` has no defaults of keys that 0.1.0 did not have."""
    parts = ("control", "standalone")
    new = [
        "podMonitor",
        "networkPolicy.dnsTo",
        *(f"{part}.{name}" for part in parts for name in ("podAnnotations", "priorityClassName", "affinity")),
    ]
    on = [f"{part}.enabled=true" for part in ("standalone", "sidecar", "serviceMonitor")]
    given = ("default", "--set", ",".join(on))
    kinds = ("NetworkPolicy", "ServiceMonitor", "PodMonitor", "Deployment", "StatefulSet")
    old = filter_kind(render(*given, "--set", ",".join(f"{name}=null" for name in new)), *kinds)
    assert old == filter_kind(render(*given), *kinds)
    for policy in filter_kind(old, "NetworkPolicy"):
        (dns,) = [each for each in policy["spec"]["egress"] if {"protocol": "UDP", "port": 53} in each["ports"]]
        assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in dns["to"]


@pytest.mark.parametrize("part", ["control", "standalone"])
def test_pods_are_annotated_and_scheduled_as_values_say(part: str) -> None:
    terms = [{"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    values = {
        "podAnnotations": {"example.com/team": "payments"},
        "priorityClassName": "system-cluster-critical",
        "affinity": affinity,
        "nodeSelector": {"pool": "apps"},
        "tolerations": [{"key": "pool", "operator": "Exists"}],
        "extraEnv": [{"name": "AWS_USE_FIPS_ENDPOINT", "value": "true"}],
    }
    given = [
        argument for name, value in values.items() for argument in ("--set-json", f"{part}.{name}={json.dumps(value)}")
    ]
    made = filter_kind(render("everything", *given), "Deployment" if part == "control" else "StatefulSet")
    (template,) = [each["spec"]["template"] for each in made]
    assert template["metadata"]["annotations"]["example.com/team"] == "payments"
    assert "checksum/config" in template["metadata"]["annotations"]
    for name in ("priorityClassName", "affinity", "nodeSelector", "tolerations"):
        assert template["spec"][name] == values[name]
    assert find_product_container(template["spec"])["env"] == values["extraEnv"]


def test_pod_monitor_selects_sidecars_by_label_and_port() -> None:
    (monitor,) = filter_kind(render("everything"), "PodMonitor")
    (sidecar,) = filter_kind(manifest("sidecar.yaml"), "Deployment")
    template = sidecar["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {each["name"] for each in find_product_container(template["spec"])["ports"]}
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["shop", "default"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_pod_monitor_needs_no_service_monitor() -> None:
    assert [*filter_kind(render("default"), "PodMonitor", "ServiceMonitor")] == []
    found = render("default", "--set", "podMonitor.enabled=true")
    assert [each["kind"] for each in filter_kind(found, "PodMonitor", "ServiceMonitor")] == ["PodMonitor"]


def test_each_part_can_be_disabled() -> None:
    off = ("--set", "control.enabled=false")
    assert render(LABELS, *off, "--set", "control.ingress.enabled=false") == []
    both = render("both")
    assert {each["metadata"]["name"] for each in filter_kind(both, "StatefulSet", "Deployment")} == {
        "spend-price-keeper-standalone"
    }
    assert filter_kind(both, "NetworkPolicy") == []
    (pod,) = [each for each in pods(both) if "initContainers" not in each and "args" in each["containers"][0]]
    assert "--role" in find_product_container(pod)["args"]
    assert next(each for each in pod["volumes"] if each["name"] == "journal")["emptyDir"]


def test_changed_configuration_restarts_pods() -> None:
    def checksums(*more: str) -> str:
        (deployment,) = filter_kind(render(LABELS, *more), "Deployment")
        checksum: str = deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return checksum

    assert checksums() == checksums()
    assert checksums() != checksums("--set", "config.upstream.region=eu-west-1")


def test_image_digest_wins_over_tag() -> None:
    images = {container["image"] for pod in pods(render("everything")) for container in pod["containers"]}
    assert images == {f"registry.example.com/price-keeper@sha256:{'a' * 64}"}
    (pod, _) = pods(render(LABELS))
    assert find_product_container(pod)["image"] == "registry.example.com/price-keeper:0.2.0"


def test_long_release_name_is_truncated() -> None:
    for each in render("everything", "--set", f"fullnameOverride={'a' * 80}"):
        assert len(each["metadata"]["name"]) <= (52 if each["kind"] == "StatefulSet" else 63)  # it adds a hash


def test_rules_file_becomes_prometheus_rule(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RULES)
    given = ("--set", "prometheusRule.enabled=true", "--set-file", f"prometheusRule.rules={tmp_path / 'rules.yaml'}")
    (rule,) = filter_kind(render(LABELS, *given), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES)


def test_monitors_select_their_services() -> None:
    found = render("everything")
    (monitor,) = filter_kind(found, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    for service in filter_kind(found, "Service"):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_single_replica_allows_node_drain() -> None:
    found = render("control", "--set", "control.replicas=1")
    (budget,) = filter_kind(found, "PodDisruptionBudget")
    assert budget["spec"].get("minAvailable", 0) < 1


def test_helm_test_probes_each_service() -> None:
    found = render("everything")
    tests = [each for each in filter_kind(found, "Pod") if each["metadata"]["annotations"]["helm.sh/hook"] == "test"]
    asked = {each["spec"]["containers"][0]["command"][-1] for each in tests}
    assert asked == {f"http://{each['metadata']['name']}:8082/ready" for each in filter_kind(found, "Service")}
    for each in tests:
        compile(each["spec"]["containers"][0]["command"][2], "test", "exec")


def test_network_policy_admits_helm_test() -> None:
    found = render("everything")
    labels = filter_kind(found, "Pod")[0]["metadata"]["labels"]
    for policy in filter_kind(found, "NetworkPolicy"):
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
        selectors = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
        assert any(each.items() <= labels.items() for each in selectors)


def test_notes_name_addresses(tmp_path: Path) -> None:
    notes = render_notes(tmp_path, "everything")
    assert "http://spend-price-keeper-control.default:8081" in notes
    assert "AWS_ENDPOINT_URL_BEDROCK_RUNTIME=https://spend-price-keeper-standalone.default:8080" in notes
    assert "plain http" not in notes
