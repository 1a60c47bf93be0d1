"""The IAM permissions of each role: actions by table, policies, a CloudFormation template with roles for EKS. Pure.

`get_table_permissions` lists the actions of each role on each table; `tests/flow/test_doctor_permissions.py` checks
that the code uses no others. `deploy/iam/write.py` writes the policies and the template; `tests/deploy/test_iam.py`
checks that those files are current. The roles are for pods of EKS, by Pod Identity or, with an OpenID Connect
provider, by IRSA.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from price_keeper.app import Role
from price_keeper.config.config_sections import DEMO_LABELS
from price_keeper.model_ids import find_base_model
from price_keeper.operations import Operation
from price_keeper.stores import cloudformation
from price_keeper.stores.schema import TABLES
from price_keeper.usage.price_list_client import PRICE_LIST_REGION

ACTIONS = ("GetItem", "BatchGetItem", "Query", "PutItem", "UpdateItem", "DeleteItem", "ConditionCheckItem")
_GET, _BATCH, _QUERY, _PUT, _UPDATE, _DELETE, _CHECK = ACTIONS

TablePermissions = Mapping[str, frozenset[str]]  # by table

# Every role records spend, aggregates it, and reads budget states and revoked tokens.
_ALL_ROLES: Mapping[str, tuple[str, ...]] = {
    "config": (_GET, _BATCH, _QUERY),
    "sticky-state": (_BATCH, _UPDATE),
    "usage-agg-sharded": (_BATCH, _UPDATE),
    "daily-total": (_GET, _BATCH, _PUT, _UPDATE),
    "request-dedup": (_QUERY, _PUT, _UPDATE),
    "revoked-tokens": (_BATCH,),
}
_CALL_ROLES: Mapping[str, tuple[str, ...]] = {
    "pricing-cache": (_QUERY, _PUT),
    "rate-buckets": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _CHECK),
}
_CONTROL_ROLES: Mapping[str, tuple[str, ...]] = {
    "config": (_PUT, _UPDATE, _CHECK),
    "sticky-state": (_GET,),
    "request-dedup": (_GET,),
    "rate-buckets": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _CHECK),
    "revoked-tokens": (_PUT,),
    "secret-retrieval-tokens": (_GET, _PUT, _UPDATE, _DELETE),
    "sessions": (_GET, _BATCH, _QUERY, _PUT, _UPDATE, _DELETE),
    "audit": (_QUERY, _PUT),
}


def get_table_permissions(role: Role) -> TablePermissions:
    """The actions of a role by table, without the tables that it does not use."""
    parts = [_ALL_ROLES]
    if role != "control":
        parts.append(_CALL_ROLES)
    if role != "sidecar":
        parts.append(_CONTROL_ROLES)
    by_table = {table: frozenset(action for part in parts for action in part.get(table, ())) for table in TABLES}
    return {table: actions for table, actions in by_table.items() if actions}


ROLES: tuple[Role, ...] = ("sidecar", "control", "both")
_PREFIX = "price-keeper-"

# The IAM actions of each operation of the data port. Chat completions and asynchronous jobs have none of their own.
ACTIONS_BY_OPERATION: Mapping[Operation, tuple[str, ...]] = {each: each.traits.actions for each in Operation}


def _build_any_account_arn(service: str, resource: str) -> str:
    """An ARN for any region and account."""
    return f"arn:aws:{service}:*:*:{resource}"


# The models of the labels in the initial config.yaml and in deploy/, in any region; change them for other labels. A
# call of an inference profile needs permission for the profile and for the model behind it.
_DEMO_MODELS = (
    *(label.model for label in DEMO_LABELS.values()),
    "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
    "us.amazon.nova-lite-v1:0",
)
DEMO_MODEL_ARNS = (
    *dict.fromkeys(f"arn:aws:bedrock:*::foundation-model/{find_base_model(model)}" for model in _DEMO_MODELS),
    *(
        _build_any_account_arn("bedrock", f"inference-profile/{model}")
        for model in _DEMO_MODELS
        if model != find_base_model(model)
    ),
)

# The actions of `price-keeper tables create` and `check`; creating a table with tags needs `TagResource`.
_CREATION_ACTIONS = (
    "CreateTable",
    "DescribeContinuousBackups",
    "DescribeTable",
    "DescribeTimeToLive",
    "TagResource",
    "UpdateContinuousBackups",
    "UpdateTable",
    "UpdateTimeToLive",
)

BuildArn = Callable[[str, str], Any]  # from a service and a resource
Statement = dict[str, Any]


def build_policy(
    role: Role, arn: BuildArn = _build_any_account_arn, prefix: str = _PREFIX, models: Any = DEMO_MODEL_ARNS
) -> dict[str, Any]:
    calls = () if role == "control" else _build_call_statements(arn, models)
    return _build_document([*_build_table_statements(role, arn, prefix), *calls])


def build_creation_policy(arn: BuildArn = _build_any_account_arn, prefix: str = _PREFIX) -> dict[str, Any]:
    arns = [arn("dynamodb", f"table/{prefix}{table}") for table in TABLES]
    return _build_document([_build_statement("Tables", "dynamodb", _CREATION_ACTIONS, arns)])


def _build_table_statements(role: Role, arn: BuildArn, prefix: str) -> Iterable[Statement]:
    for table, needed in get_table_permissions(role).items():
        actions = [action for action in ACTIONS if action in needed]
        yield _build_statement(_to_camel_case(table), "dynamodb", actions, [arn("dynamodb", f"table/{prefix}{table}")])


def _build_call_statements(arn: BuildArn, models: Any) -> Iterable[Statement]:
    guardrails = [arn("bedrock", "guardrail/*"), arn("bedrock", "guardrail-profile/*")]
    yield _build_statement("Models", "bedrock", ("InvokeModel", "InvokeModelWithResponseStream", "CountTokens"), models)
    yield _build_statement("Jobs", "bedrock", ("InvokeModel", "GetAsyncInvoke"), [arn("bedrock", "async-invoke/*")])
    yield _build_statement("Guardrails", "bedrock", ("ApplyGuardrail",), guardrails)
    yield _build_statement(
        "Profiles", "bedrock", ("GetInferenceProfile",), [arn("bedrock", "application-inference-profile/*")]
    )
    # These two actions apply to no resource with an ARN, so AWS accepts only "*".
    yield _build_statement("GuardrailChecks", "bedrock", ("InvokeGuardrailChecks",), "*")
    where = {"StringEquals": {"aws:RequestedRegion": PRICE_LIST_REGION}}
    yield {**_build_statement("Prices", "pricing", ("GetProducts",), "*"), "Condition": where}


def _build_statement(name: str, service: str, actions: Sequence[str], resource: Any) -> Statement:
    resources = list(resource) if isinstance(resource, tuple) else resource
    return {"Sid": name, "Effect": "Allow", "Action": [f"{service}:{each}" for each in actions], "Resource": resources}


def _build_document(statements: list[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _to_camel_case(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


_POD_ROLES = ("sidecar", "control")


def build_roles_template() -> dict[str, Any]:
    policies = {
        f"{role.capitalize()}Policy": _build_policy_resource(
            role, build_policy(role, _build_arn, "", _MODELS_PARAMETER)
        )
        for role in ROLES
    }
    policies["TablesPolicy"] = _build_policy_resource("tables", build_creation_policy(_build_arn, ""))
    roles = {f"{role.capitalize()}Role": _build_role_resource(role) for role in _POD_ROLES}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "What IAM has to allow Bedrock Price Keeper, by role, and roles for pods of EKS.",
        "Parameters": _PARAMETERS,
        "Conditions": {
            **cloudformation.build_tables_template()["Conditions"],
            "UsesOidc": {"Fn::Not": [{"Fn::Equals": [{"Ref": "OidcProvider"}, ""]}]},
        },
        "Resources": policies | {"KeyPolicy": _KEY_POLICY} | roles,
        "Outputs": {
            **{f"{name}Arn": {"Value": {"Ref": name}} for name in policies},
            "KeyPolicyArn": {"Condition": "HasKey", "Value": {"Ref": "KeyPolicy"}},
            **{f"{name}Arn": {"Value": {"Fn::GetAtt": [name, "Arn"]}} for name in roles},
        },
    }


# A condition of Pod Identity compares a namespace with a list and a name with a list, and cannot pair them.
_MORE_ACCOUNTS = (
    "NAMESPACE:NAME,NAMESPACE:NAME. Without OidcProvider they are not pairs: "
    "shop:default,pay:keeper admits pay:default too"
)
_PARAMETERS: dict[str, dict[str, str]] = {
    **cloudformation.build_tables_template()["Parameters"],
    "Models": {
        "Type": "CommaDelimitedList",
        "Default": ",".join(DEMO_MODEL_ARNS),
        "Description": "ARNs of the models and inference profiles that may be called: those of your labels alone.",
    },
    "OidcProvider": {
        "Type": "String",
        "Default": "",
        "Description": "For IRSA: oidc.eks.REGION.amazonaws.com/id/ID, without https://. Empty: EKS Pod Identity.",
    },
    "Namespace": {"Type": "String", "Default": "default", "Description": "Where the pods are."},
    "SidecarServiceAccount": {
        "Type": "String",
        "Default": "sample-app",
        "Description": "Whose pods have a sidecar: the service account of the app.",
    },
    "ControlServiceAccount": {
        "Type": "String",
        "Default": "price-keeper-control",
        "Description": "Of the control service.",
    },
    "MoreSidecarServiceAccounts": {
        "Type": "CommaDelimitedList",
        "Default": "",
        "Description": f"Others that use the role of sidecars: {_MORE_ACCOUNTS}",
    },
    "MoreControlServiceAccounts": {
        "Type": "CommaDelimitedList",
        "Default": "",
        "Description": f"Others that use the role of the control service: {_MORE_ACCOUNTS}",
    },
}
_MODELS_PARAMETER = {"Ref": "Models"}


def _build_arn(service: str, resource: str) -> dict[str, str]:
    """Tables are in the region of the stack; Bedrock may be called in several regions."""
    if service == "dynamodb":
        name = resource.replace("table/", "table/${TablePrefix}")
        return {"Fn::Sub": f"arn:${{AWS::Partition}}:dynamodb:${{AWS::Region}}:${{AWS::AccountId}}:{name}"}
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:{service}:*:${{AWS::AccountId}}:{resource}"}


def _build_policy_resource(name: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {"Description": f"Bedrock Price Keeper: {name}", "PolicyDocument": document},
    }


# Who uses a table that is encrypted with a key of the account needs the key too, through DynamoDB alone.
_KEY_POLICY: dict[str, Any] = {
    "Type": "AWS::IAM::ManagedPolicy",
    "Condition": "HasKey",
    "Properties": {
        "Description": "Bedrock Price Keeper: the key of the tables",
        "PolicyDocument": _build_document(
            [
                {
                    **_build_statement(
                        "Key",
                        "kms",
                        ("CreateGrant", "Decrypt", "DescribeKey", "Encrypt", "GenerateDataKey*", "ReEncrypt*"),
                        [{"Ref": "KmsKeyArn"}],
                    ),
                    "Condition": {
                        "StringLike": {"kms:ViaService": {"Fn::Sub": "dynamodb.${AWS::Region}.${AWS::URLSuffix}"}}
                    },
                }
            ]
        ),
    },
}


def _build_role_resource(role: str) -> dict[str, Any]:
    name = role.capitalize()
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "Description": f"Bedrock Price Keeper: pods with the {role} role",
            "ManagedPolicyArns": [
                {"Ref": f"{name}Policy"},
                {"Fn::If": ["HasKey", {"Ref": "KeyPolicy"}, {"Ref": "AWS::NoValue"}]},
            ],
            "AssumeRolePolicyDocument": {
                "Fn::If": [
                    "UsesOidc",
                    {"Fn::Sub": [json.dumps(_build_oidc_trust(name)), {"More": _join_more(name, _NEXT_SUBJECT)}]},
                    _build_pod_identity_trust(name),
                ]
            },
        },
    }


_SUBJECT = "system:serviceaccount:"
_NEXT_SUBJECT = f'", "{_SUBJECT}'  # between two subjects in JSON text


def _join_more(name: str, separator: str) -> dict[str, Any]:
    return {"Fn::Join": [separator, {"Ref": f"More{name}ServiceAccounts"}]}


def _build_oidc_trust(name: str) -> dict[str, Any]:
    """A trust policy as JSON text, since a template cannot use a parameter in a key."""
    provider = "arn:${AWS::Partition}:iam::${AWS::AccountId}:oidc-provider/${OidcProvider}"
    who = [f"{_SUBJECT}${{Namespace}}:${{{name}ServiceAccount}}", f"{_SUBJECT}${{More}}"]
    return _build_trust_policy(
        {"Federated": provider},
        ["sts:AssumeRoleWithWebIdentity"],
        [{"${OidcProvider}:aud": "sts.amazonaws.com", "${OidcProvider}:sub": who}],
    )


def _build_pod_identity_trust(name: str) -> dict[str, Any]:
    """Of the further accounts, the namespaces and names are two lists, as a template cannot pair them; an association
    in the cluster is needed as well."""
    more = {"Fn::Split": [":", _join_more(name, ":")]}
    pairs: list[tuple[Any, Any]] = [({"Ref": "Namespace"}, {"Ref": f"{name}ServiceAccount"}), (more, more)]
    tag = "aws:RequestTag/kubernetes-"
    return _build_trust_policy(
        {"Service": "pods.eks.amazonaws.com"},
        ["sts:AssumeRole", "sts:TagSession"],
        [{f"{tag}namespace": namespace, f"{tag}service-account": account} for namespace, account in pairs],
    )


def _build_trust_policy(
    principal: dict[str, str], actions: list[str], conditions: list[dict[str, Any]]
) -> dict[str, Any]:
    """A trust policy with a statement for each of the conditions."""
    statements = [
        {"Effect": "Allow", "Principal": principal, "Action": actions, "Condition": {"StringEquals": equals}}
        for equals in conditions
    ]
    return {"Version": "2012-10-17", "Statement": statements}
