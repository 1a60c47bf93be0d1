"""Stands in for aws, kubectl, helm and docker, so that a page's commands are carried out without AWS and a cluster.

`aws` is boto3 against the server at AWS_ENDPOINT_URL. `helm` renders, and what is rendered or applied is checked by the
schemas of Kubernetes and kept in the folder STAND_IN. A Deployment runs while a command looks at it: `kubectl exec` and
`kubectl logs` start its containers as processes of this machine, with the ConfigMaps and Secrets that they mount, and
end them. `docker` only looks at its words. Run as: python -m tests.support.cluster_stand_in PROGRAM WORD ...
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.commands import ROOT, Sidecar, build_environment, sidecar
from tests.support.deploy_tools import Document, documents, find_product_container, run_tool, tool

PROGRAMS = ("aws", "kubectl", "helm", "docker")
STATE = Path(os.environ.get("STAND_IN", "."))
_SECRETS, _JOURNAL = "/run/secrets/price-keeper", "/var/lib/price-keeper"


def write_programs(folder: Path) -> None:
    folder.mkdir()
    for name in PROGRAMS:
        text = f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.support.cluster_stand_in {name} "$@"\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)


def options(words: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Plain words, and what stands behind each option, up to the next one."""
    plain: list[str] = []
    given: dict[str, list[str]] = {}
    values = plain
    for word in words:
        if word.startswith("-") and word != "-":
            name, equals, value = word.lstrip("-").partition("=")
            values = given.setdefault(name, [])
            if equals:
                values.append(value)
        else:
            values.append(word)
    return plain, given


def aws(words: list[str]) -> None:
    import boto3
    import jmespath

    (service, operation, *_), given = options(words)
    client = boto3.client(service, region_name=os.environ["AWS_REGION"])
    if (service, operation) == ("cloudformation", "deploy"):
        _deploy(client, given)
        return
    if (service, operation) == ("ecr", "get-login-password"):
        print("a password")
        return
    rest = {name: value for name, value in given.items() if name not in ("query", "output")}
    kind = str.lower if service == "eks" else str
    named = {_camel(name) if kind is str else _camel(name).lower(): " ".join(value) for name, value in rest.items()}
    answer = getattr(client, operation.replace("-", "_"))(**named)
    if "query" in given:
        found = jmespath.search(given["query"][0], answer)
        print("\t".join(found) if isinstance(found, list) else found)


def _camel(name: str) -> str:
    words = name.split("-")
    return (words[0] if words[0] == "repository" else words[0].capitalize()) + "".join(map(str.capitalize, words[1:]))


def _deploy(client: Any, given: dict[str, list[str]]) -> None:
    pairs = [each.split("=", 1) for each in given.get("parameter-overrides", ())]
    client.create_stack(
        StackName=given["stack-name"][0],
        TemplateBody=Path(given["template-file"][0]).read_text(),
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in pairs],
        Capabilities=given.get("capabilities", []),
        Tags=[dict(zip(("Key", "Value"), each.split("=", 1), strict=True)) for each in given.get("tags", ())],
    )
    (stack,) = client.describe_stacks(StackName=given["stack-name"][0])["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE", stack
    declared = yaml.safe_load(Path(given["template-file"][0]).read_text())["Parameters"]
    assert {name for name, _ in pairs} <= declared.keys(), "CloudFormation refuses parameters that it does not know"


def helm(words: list[str]) -> None:
    assert words[:2] == ["upgrade", "--install"], words
    rest = [each for each in words[2:] if each != "--wait"]
    _apply(run_tool(tool("helm"), "template", *rest))


def _apply(text: str) -> None:
    found = [each for each in documents(text) if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    path = STATE / "applied.yaml"
    path.write_text(yaml.safe_dump_all(found))
    run_tool(tool("kubernetes-validate"), "--strict", "-k", "1.29", path)
    for each in found:
        name = f"{each['kind']}-{each['metadata']['name']}.yaml"
        (STATE / name).write_text(yaml.safe_dump(each))


def _applied(kind: str, name: str) -> Document:
    path = STATE / f"{kind}-{name}.yaml"
    assert path.exists(), f"there is no {kind} {name}"
    found: Document = yaml.safe_load(path.read_text())
    return found


def kubectl(words: list[str]) -> None:
    before, separator, command = words, "", []
    if "--" in words:
        at = words.index("--")
        before, separator, command = words[:at], "--", words[at + 1 :]
    plain, given = options(before)
    if "namespace" in given and plain == []:  # its value, and then the words
        given["namespace"], plain = given["namespace"][:1], given["namespace"][1:]
    plain = [*plain, *given.get("i", [])]
    verb = plain[0]
    if verb == "create" and plain[1] == "configmap":
        source = Path(given["from-file"][0])
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": plain[2]}}
        _apply(yaml.safe_dump(made | {"data": {source.name: source.read_text()}}))
    elif verb == "apply":
        _apply("\n---\n".join(Path(each).read_text() for each in given["f"]))
    elif verb == "exec":
        assert separator
        _exec(plain[1].removeprefix("deployment/"), command)
    elif verb == "logs":
        _logs(plain[1].removeprefix("deployment/"), given["container"][0])
    elif verb == "rollout":
        _applied("Deployment", plain[2].removeprefix("deployment/"))
    else:
        assert plain[:2] == ["create", "namespace"], words


@contextmanager
def _running(deployment: str) -> Iterator[tuple[Sidecar, Path]]:
    """Its price-keeper, as a process, and the folder that has what it mounts."""
    pod = _applied("Deployment", deployment)["spec"]["template"]["spec"]
    account = _applied("ServiceAccount", pod["serviceAccountName"])
    role = account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"]
    assert re.fullmatch(r"arn:aws:iam::\d+:role/price-keeper-roles-\w+-\w+", role), role
    container = find_product_container(pod)
    folder = STATE / deployment
    folder.mkdir(exist_ok=True)
    for volume in pod["volumes"]:
        if "configMap" in volume:
            for name, text in _applied("ConfigMap", volume["configMap"]["name"])["data"].items():
                (folder / name).write_text(text.replace(_SECRETS, str(folder)).replace(_JOURNAL, str(folder)))
        if "secret" in volume:
            for name, value in _applied("Secret", volume["secret"]["secretName"])["data"].items():
                (folder / name).write_bytes(base64.b64decode(value))
    words = [str(folder / "config.yaml") if each.endswith("config.yaml") else each for each in container["args"]]
    with sidecar(*words, folder=folder, **_surroundings()) as running:
        yield running, folder
        assert running.stop() == 0, running.errors


def _surroundings() -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "PRICE_KEEPER__STORE__ENDPOINT": os.environ["AWS_ENDPOINT_URL"],
        "PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated",
        "PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0",
        "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0",
        "PRICE_KEEPER__LISTEN__HEALTH": "127.0.0.1:0",
    }


def _exec(deployment: str, command: list[str]) -> None:
    with _running(deployment) as (running, folder):
        words = [each.replace(_SECRETS, str(folder)).replace("/etc/price-keeper", str(folder)) for each in command[1:]]
        environment = build_environment(_surroundings() | {"PRICE_KEEPER_API_URL": running.control})
        program = [sys.executable, "-m", "price_keeper.cli", *words]
        done = subprocess.run(program, env=environment, check=False)
    sys.exit(done.returncode)


def _logs(deployment: str, container: str) -> None:
    """The first line of its app, which runs until then."""
    pod = _applied("Deployment", deployment)["spec"]["template"]["spec"]
    (app,) = [each for each in pod["containers"] if each["name"] == container]
    with _running(deployment) as (running, folder):
        given = {each["name"]: each["value"] for each in app["env"]}
        assert given["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] == "http://127.0.0.1:8080"
        given["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] = running.data
        program = [sys.executable, str(folder / "app.py")]
        with subprocess.Popen(program, env=build_environment(given), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            print(process.stdout.readline(), end="")
            process.kill()


def docker(words: list[str]) -> None:
    plain, given = options(words)
    assert plain[0] in ("login", "build", "push")
    if "password-stdin" in given:
        sys.stdin.read()
    if plain[0] == "build":
        assert (ROOT / "Dockerfile").is_file()
        assert all(each.partition("=")[0] in (ROOT / "Dockerfile").read_text() for each in given["build-arg"])


if __name__ == "__main__":
    {"aws": aws, "kubectl": kubectl, "helm": helm, "docker": docker}[sys.argv[1]](sys.argv[2:])
