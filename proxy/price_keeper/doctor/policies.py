"""The least that IAM has to allow each role: the store's tables as `needs` has them, Bedrock, and its price list. Pure.

`deploy/iam/write.py` writes what is made from it; `tests/deploy/test_iam.py` holds the files to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from price_keeper.app import Role
from price_keeper.config.config_sections import DEMO_LABELS
from price_keeper.doctor.needs import ACTIONS, get_table_permissions
from price_keeper.metering.aws_price_list import PRICE_LIST_REGION
from price_keeper.operations import Operation
from price_keeper.stores.schema import TABLES

ROLES: tuple[Role, ...] = ("sidecar", "control", "both")
_PREFIX = "price-keeper-"

# What each operation of the data port is called in a policy. Chat completions and asynchronous jobs have no action of
# their own, and bidirectional streams are refused.
ACTIONS_BY_OPERATION: Mapping[Operation, tuple[str, ...]] = {
    Operation.INVOKE: ("InvokeModel",),
    Operation.INVOKE_STREAM: ("InvokeModelWithResponseStream",),
    Operation.INVOKE_BIDIRECTIONAL: (),
    Operation.CONVERSE: ("InvokeModel",),
    Operation.CONVERSE_STREAM: ("InvokeModelWithResponseStream",),
    Operation.COUNT_TOKENS: ("CountTokens",),
    Operation.APPLY_GUARDRAIL: ("ApplyGuardrail",),
    Operation.CHECK_GUARDRAILS: ("InvokeGuardrailChecks",),
    Operation.ASYNC_INVOKES: ("InvokeModel",),
    Operation.ASYNC_INVOKE: ("GetAsyncInvoke",),
    Operation.CHAT_COMPLETIONS: ("InvokeModel", "InvokeModelWithResponseStream"),
}


def _build_any_account_arn(service: str, resource: str) -> str:
    """In any region, and in whatever account the policy stands."""
    return f"arn:aws:{service}:*:*:{resource}"


# Those of the labels that config.yaml and the files in deploy/ begin with, in any region. Whoever has other labels
# names theirs. Who calls an inference profile needs to be allowed it and the model behind it.
_DEMO_PROFILES = ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "us.amazon.nova-lite-v1:0")
DEMO_MODEL_ARNS = (
    *(f"arn:aws:bedrock:*::foundation-model/{label.model}" for label in DEMO_LABELS.values()),
    *(_build_any_account_arn("bedrock", f"inference-profile/{name}") for name in _DEMO_PROFILES),
)

# What `price-keeper tables create` and `check` do.
_CREATION_ACTIONS = (
    "CreateTable",
    "DescribeContinuousBackups",
    "DescribeTable",
    "DescribeTimeToLive",
    "UpdateContinuousBackups",
    "UpdateTimeToLive",
)

BuildArn = Callable[[str, str], Any]  # of a service, and of what it has
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
    # These two act on nothing that has an ARN, so AWS takes no other resource for them.
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
