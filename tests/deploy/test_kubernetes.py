"""What is given to Kubernetes, the plain manifests and what the chart makes: accepted, safe, whole, and true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml
from price_keeper import app
from price_keeper.cli.root_parser import build_root_parser
from price_keeper.ledger.recording import LAST_FLUSH_TIMEOUT_SECONDS, LAST_RETURN_TIMEOUT_SECONDS
from price_keeper.workers.supervisor import STOP_SECONDS

from tests.support.deploy_tools import (
    DEPLOY,
    Document,
    assert_good_config,
    containers,
    documents,
    filter_kind,
    find_product_container,
    manifest,
    pods,
)

MADE_BY_CHART = "spend-price-keeper-control-keys"
MADE_BY_HAND = {"sample-app-program"}  # a ConfigMap; the command for it stands in the manifest
DRAIN = app.DRAIN_SECONDS + LAST_FLUSH_TIMEOUT_SECONDS + LAST_RETURN_TIMEOUT_SECONDS


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_file_is_yaml(path: Path) -> None:
    if "templates" not in path.parts:
        assert documents(path.read_text())


def test_containers_meet_restricted_profile(found: list[Document]) -> None:
    """As the restricted profile of Pod Security has it, and more."""
    for pod in pods(found):
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        whole = pod["securityContext"]
        assert whole["fsGroup"] == 10001  # otherwise the journal is not writable
        for container in containers(pod):
            own = {**whole, **container["securityContext"]}
            assert own["runAsNonRoot"] is True
            assert own["runAsUser"] >= 1000
            assert own["seccompProfile"] == {"type": "RuntimeDefault"}
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert "cpu" not in container["resources"]["limits"]  # throttling would slow every call


def test_manifests_contain_no_secret(found: list[Document]) -> None:
    """But for the one that the chart makes of random keys, where none is named."""
    assert {each["metadata"]["name"] for each in filter_kind(found, "Secret")} <= {MADE_BY_CHART}
    for pod in pods(found):
        for container in containers(pod):
            named = [each for each in container.get("env", []) if re.search("KEY|SECRET|TOKEN", each["name"])]
            assert {each.get("value", "any") for each in named} <= {"any"}


def _selected(found: list[Document], selector: dict[str, str]) -> list[Document]:
    templates = [each["spec"]["template"] for each in found if "template" in each.get("spec", {})]
    return [each for each in templates if selector.items() <= each["metadata"]["labels"].items()]


def test_referenced_names_exist(found: list[Document]) -> None:
    config_maps = {each["metadata"]["name"] for each in filter_kind(found, "ConfigMap")} | MADE_BY_HAND
    accounts = {each["metadata"]["name"] for each in filter_kind(found, "ServiceAccount")} | {"sample-app"}
    for each in found:
        for pod in pods([each]):
            claims = each["spec"].get("volumeClaimTemplates", [])
            volumes = {volume["name"] for volume in pod.get("volumes", [])} | {it["metadata"]["name"] for it in claims}
            for volume in pod.get("volumes", []):
                assert volume.get("configMap", {}).get("name", "sample-app-program") in config_maps
            for container in containers(pod):
                mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
                assert mounted <= volumes
                _check_ports(container)
            assert pod.get("serviceAccountName", "sample-app") in accounts
    for each in filter_kind(found, "Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet"):
        selector = each["spec"].get("selector") or each["spec"]["podSelector"]
        assert _selected(found, selector.get("matchLabels", selector)), each["metadata"]["name"]


def _check_ports(container: Document) -> None:
    named = {port["name"] for port in container.get("ports", [])}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        port = container.get(kind, {}).get("httpGet", {}).get("port")
        assert port is None or port in named or port in [each["containerPort"] for each in container["ports"]]


def test_services_target_existing_ports(found: list[Document]) -> None:
    for service in filter_kind(found, "Service"):
        for template in _selected(found, service["spec"]["selector"]):
            ports = {each["name"] for each in find_product_container(template["spec"])["ports"]}
            assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports


def _parts(found: list[Document]) -> Iterator[tuple[Document, dict[str, Any], str]]:
    """Each pod that runs price-keeper, with its configuration."""
    for pod in pods(found):
        if any("serve" in each.get("args", []) for each in containers(pod)):
            mount = next(
                it["name"]
                for it in find_product_container(pod)["volumeMounts"]
                if it["mountPath"] == "/etc/price-keeper"
            )
            name = next(it["configMap"]["name"] for it in pod["volumes"] if it["name"] == mount)
            text = next(
                it["data"]["config.yaml"] for it in filter_kind(found, "ConfigMap") if it["metadata"]["name"] == name
            )
            yield pod, yaml.safe_load(text), text


def test_configurations_are_accepted(found: list[Document], tmp_path: Path) -> None:
    parts = list(_parts(found))
    assert parts
    for _, _, text in parts:
        assert_good_config(text, tmp_path, PRICE_KEEPER_WEBHOOK_SECRET="as the chart has it mounted")


def test_commands_are_accepted(found: list[Document]) -> None:
    for pod, _, _ in _parts(found):
        chosen = build_root_parser().parse_args(find_product_container(pod)["args"])
        assert str(chosen.config) == "/etc/price-keeper/config.yaml"


def test_configured_paths_are_mounted(found: list[Document]) -> None:
    for pod, config, _ in _parts(found):
        mounts = {each["mountPath"]: each for each in find_product_container(pod)["volumeMounts"]}
        assert mounts["/var/lib/price-keeper"].get("readOnly") is not True
        assert config["journal"]["dir"].startswith("/var/lib/price-keeper/")
        files = [
            value for key in config["auth"].get("keys", []) for name, value in key.items() if name.endswith("_file")
        ]
        files += [value for name, value in config["auth"].items() if name.endswith("_file")]
        assert files or config["auth"]["mode"] == "identity"
        for path in (*files, *config["listen"].get("tls", {}).values()):
            assert mounts[path.rpartition("/")[0]]["readOnly"] is True


def test_sidecars_cannot_mint_tokens(found: list[Document]) -> None:
    for pod, config, _ in _parts(found):
        if build_root_parser().parse_args(find_product_container(pod)["args"]).role == "sidecar":
            assert all("public_key_file" in key for key in config["auth"].get("keys", []))
            needs_keys = config["auth"].get("mode") != "identity"
            assert any(each["name"] == "price-keeper-keys" for each in pod["volumes"]) <= needs_keys
            assert bool(config["auth"].get("keys")) == needs_keys
            assert "admin_api_key_file" not in config["auth"]


def test_probes_use_reachable_ports(found: list[Document]) -> None:
    """A kubelet comes from outside; what listens on loopback, only a command inside can ask."""
    for pod, config, _ in _parts(found):
        container, listen = find_product_container(pod), config["listen"]
        numbers = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert listen["health"] == "0.0.0.0:8082"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.get(kind, {}).get("httpGet")
            assert asked is None or numbers.get(asked["port"], asked["port"]) == 8082
        if build_root_parser().parse_args(container["args"]).role != "control":
            port = listen.get("data", "127.0.0.1:8080").rpartition(":")[2]
            (code,) = [each for each in container["startupProbe"]["exec"]["command"] if "import" in each]
            assert f"('127.0.0.1', {port})" in code
            compile(code, "probe", "exec")


def test_store_outage_keeps_app_in_service(found: list[Document]) -> None:
    """Sidecars of one pod are ready with their app, so with `serve` they have no such probe."""
    for pod, config, _ in _parts(found):
        if find_product_container(pod) in pod.get("initContainers", []):
            assert ("readinessProbe" in find_product_container(pod)) == (config.get("on_store_down") == "refuse")


def test_sidecar_starts_before_app_and_ends_after_it(found: list[Document]) -> None:
    for pod, _, _ in _parts(found):
        if find_product_container(pod) in pod.get("initContainers", []):
            assert find_product_container(pod)["restartPolicy"] == "Always"
        else:
            assert pod["containers"] == [find_product_container(pod)]


def test_termination_grace_covers_drain(found: list[Document]) -> None:
    for pod, _, _ in _parts(found):
        container = find_product_container(pod)
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [""])[-1]
        waits = float(hook.partition("sleep(")[2].rstrip(")") or 0)
        workers = build_root_parser().parse_args(container["args"]).workers
        takes = DRAIN if workers == 1 else STOP_SECONDS
        assert pod["terminationGracePeriodSeconds"] > waits + takes


def test_default_network_policy_restricts_control_api(found: list[Document]) -> None:
    for policy in filter_kind(found, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            assert rule["from"], "from anywhere"
            assert rule["ports"], "to anything"
        ports = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert ports == {53, 80, 443}
        assert_nothing_inside_is_reached(policy)


def test_network_policy_closes_no_port_of_an_app(found: list[Document]) -> None:
    """A policy about ingress closes every port that it does not name, and an app's ports are not known here."""
    for policy in filter_kind(found, "NetworkPolicy"):
        selected = _selected(found, policy["spec"]["podSelector"]["matchLabels"])
        is_app = any(len(containers(each["spec"])) > 1 for each in selected)
        assert policy["spec"]["policyTypes"] == (["Egress"] if is_app else ["Ingress", "Egress"])


# Of a cluster and its nodes. The agent that issues credentials and NodeLocal DNSCache have a port of their own.
INSIDE = (
    "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.20.0.1", "192.168.1.1",
    "::1", "fd00:ec2::254", "fd12:3456::1", "fe80::1",
)  # fmt: skip
AGENTS = {"169.254.170.23", "fd00:ec2::23"}
NODE_LOCAL_DNS = "169.254.20.10"
OUTSIDE = ("52.94.5.1", "2600:1f18::1")


def _reached(policy: Document, *addresses: str) -> set[tuple[str, int]]:
    """Those that a policy lets its pods reach, each with the port."""
    found = set()
    for rule in policy["spec"]["egress"]:
        for block in (peer["ipBlock"] for peer in rule["to"] if "ipBlock" in peer):
            shut = [ip_network(each) for each in block.get("except", ())]
            for address in map(ip_address, addresses):
                if address in ip_network(block["cidr"]) and not any(address in each for each in shut):
                    found |= {(str(address), port["port"]) for port in rule["ports"]}
    return found


def assert_nothing_inside_is_reached(policy: Document) -> None:
    assert _reached(policy, *INSIDE) == set()


def test_network_policy_lets_pods_reach_aws_credentials_and_names(found: list[Document]) -> None:
    """Over both versions of IP, and names from NodeLocal DNSCache as well."""
    for policy in filter_kind(found, "NetworkPolicy"):
        assert _reached(policy, *OUTSIDE) == {(each, 443) for each in OUTSIDE}
        assert _reached(policy, *AGENTS) == {(each, 80) for each in AGENTS}
        assert _reached(policy, NODE_LOCAL_DNS) == {(NODE_LOCAL_DNS, 53)}
        (names,) = [rule for rule in policy["spec"]["egress"] if {each["port"] for each in rule["ports"]} == {53}]
        assert {each["protocol"] for each in names["ports"]} == {"UDP", "TCP"}
        (labels,) = [peer["podSelector"]["matchExpressions"][0] for peer in names["to"] if "podSelector" in peer]
        assert (labels["key"], labels["values"]) == ("k8s-app", ["kube-dns", "node-local-dns"])


def test_replica_can_always_be_moved(found: list[Document]) -> None:
    for each in filter_kind(found, "PodDisruptionBudget"):
        (template,) = _selected(found, each["spec"]["selector"]["matchLabels"])
        (owner,) = [it for it in found if it.get("spec", {}).get("template") is template]
        least = each["spec"].get("minAvailable", 0)
        assert owner["spec"]["replicas"] > least
        assert each["spec"].get("maxUnavailable", 1) >= 1


def test_persistent_variant_has_same_pods() -> None:
    (plain,) = filter_kind(manifest("sidecar.yaml"), "Deployment")
    (persistent,) = filter_kind(manifest("variants/journal-persistent.yaml"), "StatefulSet")
    pod = json.loads(json.dumps(plain["spec"]["template"]))
    journal = [each for each in pod["spec"]["volumes"] if each["name"] == "price-keeper-journal"]
    pod["spec"]["volumes"].remove(journal[0])
    assert persistent["spec"]["template"] == pod
    assert [each["metadata"]["name"] for each in persistent["spec"]["volumeClaimTemplates"]] == ["price-keeper-journal"]


def test_ephemeral_variant_replaces_journal_volume() -> None:
    (patch,) = manifest("variants/journal-ephemeral.yaml")
    (volume,) = patch["spec"]["template"]["spec"]["volumes"]
    (plain,) = filter_kind(manifest("sidecar.yaml"), "Deployment")
    (own,) = [each for each in plain["spec"]["template"]["spec"]["volumes"] if each["name"] == volume["name"]]
    assert own.keys() - {"name"} == {name for name, value in volume.items() if value is None}


def test_pod_identity_uses_same_service_accounts() -> None:
    accounts = {each["metadata"]["name"] for each in manifest("variants/pod-identity.yaml")}
    used = {pod["serviceAccountName"] for name in ("sidecar.yaml", "control.yaml") for pod in pods(manifest(name))}
    assert accounts == used
    assert all("annotations" not in each["metadata"] for each in manifest("variants/pod-identity.yaml"))
