"""Builds a CloudFormation template of the DynamoDB tables, for accounts in which programs may not create tables. Pure.

`dynamodb_tables` uses `build_key_schema` and `build_attribute_definitions` too, to create and compare tables.
"""

from __future__ import annotations

from typing import Any

from price_keeper.stores.contract import EXPIRY_ATTRIBUTE
from price_keeper.stores.schema import TABLES, Table


def build_key_schema(table: Table) -> list[dict[str, str]]:
    keys = [{"AttributeName": "PK", "KeyType": "HASH"}]
    return [*keys, {"AttributeName": "SK", "KeyType": "RANGE"}] if table.has_sort_key else keys


def build_attribute_definitions(table: Table) -> list[dict[str, str]]:
    return [{"AttributeName": key["AttributeName"], "AttributeType": "S"} for key in build_key_schema(table)]


def build_tables_template() -> dict[str, Any]:
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "The DynamoDB tables of Bedrock Price Keeper.",
        "Parameters": {
            "TablePrefix": {
                "Type": "String",
                "Default": "price-keeper-",
                "AllowedPattern": "[A-Za-z0-9_.-]{0,100}",
                "Description": "What every table's name begins with; the same as store.table_prefix.",
            },
            "KmsKeyArn": {
                "Type": "String",
                "Default": "",
                "Description": "ARN of your KMS key, which encrypts the tables. Empty: the key that DynamoDB owns.",
            },
        },
        "Conditions": {"HasKey": {"Fn::Not": [{"Fn::Equals": [{"Ref": "KmsKeyArn"}, ""]}]}},
        "Resources": {_build_logical_name(table): _build_table_resource(table) for table in TABLES.values()},
        "Outputs": {
            "TableArns": {
                "Description": "For the policies of the roles that use the tables.",
                "Value": {
                    "Fn::Join": [",", [{"Fn::GetAtt": [_build_logical_name(t), "Arn"]} for t in TABLES.values()]]
                },
            }
        },
    }


def _build_logical_name(table: Table) -> str:
    return "".join(part.capitalize() for part in table.name.split("-")) + "Table"


def _build_table_resource(table: Table) -> dict[str, Any]:
    return {
        "Type": "AWS::DynamoDB::Table",
        "DeletionPolicy": "Retain",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "TableName": {"Fn::Sub": f"${{TablePrefix}}{table.name}"},
            "BillingMode": "PAY_PER_REQUEST",
            "KeySchema": build_key_schema(table),
            "AttributeDefinitions": build_attribute_definitions(table),
            "TimeToLiveSpecification": {"AttributeName": EXPIRY_ATTRIBUTE, "Enabled": True},
            "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True},
            "DeletionProtectionEnabled": True,
            "SSESpecification": {
                "Fn::If": [
                    "HasKey",
                    {"SSEEnabled": True, "SSEType": "KMS", "KMSMasterKeyId": {"Ref": "KmsKeyArn"}},
                    {"Ref": "AWS::NoValue"},
                ]
            },
            "Tags": [{"Key": "Application", "Value": "price-keeper"}],
        },
    }
