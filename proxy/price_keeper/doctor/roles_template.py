"""The policies, and roles that have them, as a CloudFormation template. Pure.

A role is for pods of EKS: by Pod Identity, or by a cluster's OpenID Connect provider (IRSA) where one is named. Whoever
runs elsewhere attaches the policies to another role.
"""

from __future__ import annotations

import json
from typing import Any

from price_keeper.doctor.policies import MODELS, ROLES, creation_policy, policy
from price_keeper.stores import cloudformation

_IN_PODS = ("sidecar", "control")


def template() -> dict[str, Any]:
    policies = {f"{role.capitalize()}Policy": _policy(role, policy(role, _arn, "", _MODELS)) for role in ROLES}
    policies["TablesPolicy"] = _policy("tables", creation_policy(_arn, ""))
    roles = {f"{role.capitalize()}Role": _role(role) for role in _IN_PODS}
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
        "Default": ",".join(MODELS),
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
_MODELS = {"Ref": "Models"}


def _arn(service: str, what: str) -> dict[str, str]:
    """Tables are in the stack's own region; Bedrock may be called in several."""
    if service == "dynamodb":
        name = what.replace("table/", "table/${TablePrefix}")
        return {"Fn::Sub": f"arn:${{AWS::Partition}}:dynamodb:${{AWS::Region}}:${{AWS::AccountId}}:{name}"}
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:{service}:*:${{AWS::AccountId}}:{what}"}


def _policy(name: str, document: dict[str, Any]) -> dict[str, Any]:
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {"Description": f"Bedrock Price Keeper: {name}", "PolicyDocument": document},
    }


def _role(role: str) -> dict[str, Any]:
    name = role.capitalize()
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "Description": f"Bedrock Price Keeper: pods with the {role} role",
            "ManagedPolicyArns": [{"Ref": f"{name}Policy"}],
            "AssumeRolePolicyDocument": {
                "Fn::If": ["UsesOidc", {"Fn::Sub": json.dumps(_by_oidc(name))}, _by_pod_identity(name)]
            },
        },
    }


def _by_oidc(name: str) -> dict[str, Any]:
    """As text, since a template cannot make a key from a parameter."""
    provider = "arn:${AWS::Partition}:iam::${AWS::AccountId}:oidc-provider/${OidcProvider}"
    who = f"system:serviceaccount:${{Namespace}}:${{{name}ServiceAccount}}"
    return _trust(
        {"Federated": provider},
        ["sts:AssumeRoleWithWebIdentity"],
        {"${OidcProvider}:aud": "sts.amazonaws.com", "${OidcProvider}:sub": who},
    )


def _by_pod_identity(name: str) -> dict[str, Any]:
    return _trust(
        {"Service": "pods.eks.amazonaws.com"},
        ["sts:AssumeRole", "sts:TagSession"],
        {
            "aws:RequestTag/kubernetes-namespace": {"Ref": "Namespace"},
            "aws:RequestTag/kubernetes-service-account": {"Ref": f"{name}ServiceAccount"},
        },
    )


def _trust(principal: dict[str, str], actions: list[str], equals: dict[str, Any]) -> dict[str, Any]:
    statement = {
        "Effect": "Allow",
        "Principal": principal,
        "Action": actions,
        "Condition": {"StringEquals": equals},
    }
    return {"Version": "2012-10-17", "Statement": [statement]}
