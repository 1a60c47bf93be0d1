"""The policies, and roles that have them, as a CloudFormation template. Pure.

A role is for pods of EKS: by Pod Identity, or by a cluster's OpenID Connect provider (IRSA) where one is named. Whoever
runs elsewhere attaches the policies to another role.
"""

from __future__ import annotations

import json
from typing import Any

from price_keeper.doctor.policies import DEMO_MODEL_ARNS, ROLES, build_creation_policy, build_policy
from price_keeper.stores import cloudformation

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
        "Conditions": {"UsesOidc": {"Fn::Not": [{"Fn::Equals": [{"Ref": "OidcProvider"}, ""]}]}},
        "Resources": policies | roles,
        "Outputs": {
            **{f"{name}Arn": {"Value": {"Ref": name}} for name in policies},
            **{f"{name}Arn": {"Value": {"Fn::GetAtt": [name, "Arn"]}} for name in roles},
        },
    }


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
}
_MODELS_PARAMETER = {"Ref": "Models"}


def _build_arn(service: str, resource: str) -> dict[str, str]:
    """Tables are in the stack's own region; Bedrock may be called in several."""
    if service == "dynamodb":
        name = resource.replace("table/", "table/${TablePrefix}")
        return {"Fn::Sub": f"arn:${{AWS::Partition}}:dynamodb:${{AWS::Region}}:${{AWS::AccountId}}:{name}"}
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:{service}:*:${{AWS::AccountId}}:{resource}"}


def _build_policy_resource(name: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {"Description": f"Bedrock Price Keeper: {name}", "PolicyDocument": document},
    }


def _build_role_resource(role: str) -> dict[str, Any]:
    name = role.capitalize()
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "Description": f"Bedrock Price Keeper: pods with the {role} role",
            "ManagedPolicyArns": [{"Ref": f"{name}Policy"}],
            "AssumeRolePolicyDocument": {
                "Fn::If": [
                    "UsesOidc",
                    {"Fn::Sub": json.dumps(_build_oidc_trust(name))},
                    _build_pod_identity_trust(name),
                ]
            },
        },
    }


def _build_oidc_trust(name: str) -> dict[str, Any]:
    """As text, since a template cannot make a key from a parameter."""
    provider = "arn:${AWS::Partition}:iam::${AWS::AccountId}:oidc-provider/${OidcProvider}"
    who = f"system:serviceaccount:${{Namespace}}:${{{name}ServiceAccount}}"
    return _build_trust_policy(
        {"Federated": provider},
        ["sts:AssumeRoleWithWebIdentity"],
        {"${OidcProvider}:aud": "sts.amazonaws.com", "${OidcProvider}:sub": who},
    )


def _build_pod_identity_trust(name: str) -> dict[str, Any]:
    return _build_trust_policy(
        {"Service": "pods.eks.amazonaws.com"},
        ["sts:AssumeRole", "sts:TagSession"],
        {
            "aws:RequestTag/kubernetes-namespace": {"Ref": "Namespace"},
            "aws:RequestTag/kubernetes-service-account": {"Ref": f"{name}ServiceAccount"},
        },
    )


def _build_trust_policy(principal: dict[str, str], actions: list[str], equals: dict[str, Any]) -> dict[str, Any]:
    statement = {
        "Effect": "Allow",
        "Principal": principal,
        "Action": actions,
        "Condition": {"StringEquals": equals},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}
