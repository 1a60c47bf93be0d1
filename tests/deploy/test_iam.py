"""The policies allow what the roles do, as `needs` tells and the data port is asked for, and nothing else."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any
from uuid import uuid4

import cfnlint
import pytest
import yaml
from price_keeper.app import open_dynamodb
from price_keeper.clock import SystemClock
from price_keeper.config import StoreConfig
from price_keeper.doctor.permissions import ACTIONS_BY_OPERATION, ROLES, get_table_permissions
from price_keeper.operations import Operation
from price_keeper.stores import dynamodb_tables

from tests.support.deploy_tools import DEPLOY
from tests.support.engines import Engines

WRITE = "run: .venv/bin/python deploy/iam/write.py"
KNOWN = Path(cfnlint.__file__).parent / "data" / "AdditionalSpecs" / "Policies.json"
LONGEST_MANAGED_POLICY = 6144  # characters, without white space


def policy(name: str) -> list[dict[str, Any]]:
    statements: list[dict[str, Any]] = json.loads((DEPLOY / "iam" / f"{name}.json").read_text())["Statement"]
    return statements


def allowed(statements: list[dict[str, Any]], service: str) -> set[tuple[str, str]]:
    """Pairs of what it is done to and the action."""
    return {
        (arn, action.partition(":")[2])
        for statement in statements
        for action in statement["Action"]
        for arn in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
        if action.startswith(f"{service}:")
    }


def test_policy_files_match_code() -> None:
    for path, text in runpy.run_path(str(DEPLOY / "iam" / "write.py"))["files"]():
        assert path.read_text() == text, WRITE


@pytest.mark.parametrize("role", ROLES)
def test_role_may_use_exactly_its_table_actions(role: Any) -> None:
    found = allowed(policy(role), "dynamodb")
    prefix = "arn:aws:dynamodb:*:*:table/price-keeper-"
    assert found == {
        (prefix + table, action) for table, actions in get_table_permissions(role).items() for action in actions
    }


NAMED_BY_AWS = {
    "application-inference-profile",
    "async-invoke",
    "guardrail",
    "guardrail-profile",
}  # what these are called is not known before


@pytest.mark.parametrize("name", [*ROLES, "tables"])
def test_policy_names_its_resources(name: str) -> None:
    """Each table and model by its name; `*` alone only for actions that AWS allows on nothing else."""
    known = json.loads(KNOWN.read_text())
    for statement in policy(name):
        if statement["Resource"] == "*":
            for service, action in (each.split(":") for each in statement["Action"]):
                assert "Resources" not in known[service]["Actions"][action.lower()]
            continue
        for arn in statement["Resource"]:
            kind, _, called = arn.split(":", 5)[5].partition("/")
            assert kind in NAMED_BY_AWS or "*" not in called, arn


CONFIGURATIONS = ("../config.yaml", "docker/config.yaml", "kubernetes/sidecar-config.yaml")


def delivered_models(name: str) -> set[str]:
    found = yaml.safe_load((DEPLOY / name).read_text())
    if "data" in found:  # of a ConfigMap
        found = yaml.safe_load(found["data"]["config.yaml"])
    return {label["model"] for label in found["labels"].values()}


def test_policy_allows_exactly_the_delivered_models() -> None:
    (models,) = (each["Resource"] for each in policy("sidecar") if each["Sid"] == "Models")
    needed = set()
    for model in set().union(*map(delivered_models, CONFIGURATIONS)):
        bare = model.removeprefix("us.").removeprefix("global.")
        needed.add(f"arn:aws:bedrock:*::foundation-model/{bare}")
        if model != bare:  # an inference profile, which calls the model in one region or another
            needed.add(f"arn:aws:bedrock:*:*:inference-profile/{model}")
    assert set(models) == needed


def test_every_operation_and_no_other_bedrock_action_is_allowed() -> None:
    assert set(ACTIONS_BY_OPERATION) == set(Operation)
    wanted = {action for actions in ACTIONS_BY_OPERATION.values() for action in actions} | {"GetInferenceProfile"}
    for role in ("sidecar", "both"):
        assert {action for _, action in allowed(policy(role), "bedrock")} == wanted
        assert allowed(policy(role), "pricing") == {("*", "GetProducts")}
    assert {each["Action"][0].partition(":")[0] for each in policy("control")} == {"dynamodb"}


async def test_table_creator_has_needed_actions(engines: Engines) -> None:
    asked: set[str] = set()
    prefix = f"t{uuid4().hex[:8]}-"
    config = StoreConfig(engine="dynamodb", endpoint=engines.endpoints["moto"], table_prefix=prefix)
    store = await open_dynamodb(config, SystemClock())
    try:
        store.client.meta.events.register("before-call.dynamodb", lambda model, **_: asked.add(model.name))
        await dynamodb_tables.create_missing_tables(store.client, prefix, SystemClock().sleep, lambda *_: None)
        await store.client.update_table(TableName=f"{prefix}audit", DeletionProtectionEnabled=False)
        await store.client.delete_table(TableName=f"{prefix}audit")
        await store.client.update_table(TableName=f"{prefix}config", DeletionProtectionEnabled=False)
        asked.clear()  # from here on one table is missing, and one is unprotected, as older versions made them
        await dynamodb_tables.create_missing_tables(
            store.client, prefix, SystemClock().sleep, lambda *_: None, tags={"team": "payments"}
        )
        await dynamodb_tables.read_table_states(store.client, prefix, SystemClock().sleep)
    finally:
        await store.close()
    tagging = {"TagResource"}  # which AWS asks for in CreateTable with tags
    assert {action for _, action in allowed(policy("tables"), "dynamodb")} == asked | tagging


@pytest.mark.parametrize("name", [*ROLES, "tables"])
def test_aws_knows_every_action_and_resource_type(name: str) -> None:
    """As cfn-lint has them from AWS."""
    known = json.loads(KNOWN.read_text())
    for statement in policy(name):
        for service, action in (each.split(":") for each in statement["Action"]):
            takes = known[service]["Actions"][action.lower()].get("Resources", [])
            if statement["Resource"] == "*":
                assert takes == [], (action, takes)
                continue
            kinds = {re.split(r"[:/]", arn.split(":", 5)[5])[0] for arn in statement["Resource"]}
            assert kinds & set(takes), (action, kinds, takes)


@pytest.mark.parametrize("name", [*ROLES, "tables"])
def test_policy_fits_into_managed_policy(name: str) -> None:
    assert len(json.dumps(policy(name), separators=(",", ":"))) < LONGEST_MANAGED_POLICY
    sids = [statement["Sid"] for statement in policy(name)]
    assert len(set(sids)) == len(sids)
    assert all(re.fullmatch("[A-Za-z0-9]+", sid) for sid in sids)


ROLES_TEMPLATE = DEPLOY / "cloudformation" / "roles.yaml"


def test_template_statements_match_policies() -> None:
    resources = yaml.safe_load(ROLES_TEMPLATE.read_text())["Resources"]
    for name in (*ROLES, "tables"):
        document = resources[f"{name.capitalize()}Policy"]["Properties"]["PolicyDocument"]
        for made, expected in zip(document["Statement"], policy(name), strict=True):
            assert (made["Sid"], made["Action"]) == (expected["Sid"], expected["Action"])
            if made["Action"][0].startswith("dynamodb:"):
                for arn, plain in zip(made["Resource"], expected["Resource"], strict=True):
                    assert arn["Fn::Sub"].endswith(plain.replace("price-keeper-", "${TablePrefix}")[20:])


OIDC = "oidc.eks.us-east-1.amazonaws.com/id/EXAMPLE"
SUBJECT = "system:serviceaccount:"


def deploy_roles(engines: Engines, role: str, **given: str) -> list[dict[str, Any]]:
    """What the trust policy of a role says, once the stack is there."""
    import boto3

    def client(service: str) -> Any:
        return boto3.client(service, endpoint_url=engines.endpoints["moto"], region_name="us-east-1")

    name = f"roles-{uuid4().hex[:8]}"
    client("cloudformation").create_stack(
        StackName=name,
        TemplateBody=ROLES_TEMPLATE.read_text(),
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        Capabilities=["CAPABILITY_IAM"],
    )
    (stack,) = client("cloudformation").describe_stacks(StackName=name)["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    outputs = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
    assert ("KeyPolicyArn" in outputs) == ("KmsKeyArn" in given)
    made = client("iam").get_role(RoleName=outputs[f"{role}RoleArn"].rpartition("/")[2])["Role"]
    trust = made["AssumeRolePolicyDocument"]
    statements: list[dict[str, Any]] = (json.loads(trust) if isinstance(trust, str) else trust)["Statement"]
    return statements


@pytest.mark.parametrize("more", ["", "ops:a,dev:b"])
@pytest.mark.parametrize("role", ["Sidecar", "Control"])
def test_irsa_role_admits_exactly_the_named_service_accounts(engines: Engines, role: str, more: str) -> None:
    given = {f"{role}ServiceAccount": "till", f"More{role}ServiceAccounts": more, "OidcProvider": OIDC}
    (statement,) = deploy_roles(engines, role, Namespace="shop", **given)
    assert statement["Principal"]["Federated"].endswith(f":oidc-provider/{OIDC}")
    equals = statement["Condition"]["StringEquals"]
    assert equals.pop(f"{OIDC}:aud") == "sts.amazonaws.com"
    assert equals == {f"{OIDC}:sub": [f"{SUBJECT}{each}" for each in ("shop:till", *more.split(","))]}


@pytest.mark.parametrize("role", ["Sidecar", "Control"])
def test_pod_identity_role_admits_the_named_service_accounts(engines: Engines, role: str) -> None:
    given = {f"{role}ServiceAccount": "till", f"More{role}ServiceAccounts": "ops:a,dev:b"}
    statements = deploy_roles(engines, role, Namespace="shop", KmsKeyArn=KEY, **given)
    assert {each["Principal"]["Service"] for each in statements} == {"pods.eks.amazonaws.com"}
    tags = [each["Condition"]["StringEquals"] for each in statements]
    words = ["ops", "a", "dev", "b"]
    assert [list(each.values()) for each in tags] == [["shop", "till"], [words, words]]
    assert {key for each in tags for key in each} == {
        "aws:RequestTag/kubernetes-namespace",
        "aws:RequestTag/kubernetes-service-account",
    }


KEY = "arn:aws:kms:us-east-1:111122223333:key/11111111-2222-4333-8444-555555555555"


def test_role_has_only_its_policy() -> None:
    """Read, since the stand-in of AWS attaches none."""
    resources = yaml.safe_load(ROLES_TEMPLATE.read_text())["Resources"]
    roles = {name: each["Properties"] for name, each in resources.items() if each["Type"] == "AWS::IAM::Role"}
    key = {"Fn::If": ["HasKey", {"Ref": "KeyPolicy"}, {"Ref": "AWS::NoValue"}]}
    assert {name: each["ManagedPolicyArns"] for name, each in roles.items()} == {
        "SidecarRole": [{"Ref": "SidecarPolicy"}, key],
        "ControlRole": [{"Ref": "ControlPolicy"}, key],
    }
    assert not any("Policies" in each for each in roles.values())


def test_key_is_used_through_dynamodb_alone() -> None:
    policy = yaml.safe_load(ROLES_TEMPLATE.read_text())["Resources"]["KeyPolicy"]
    (statement,) = policy["Properties"]["PolicyDocument"]["Statement"]
    assert statement["Resource"] == [{"Ref": "KmsKeyArn"}]
    assert statement["Condition"]["StringLike"].keys() == {"kms:ViaService"}
