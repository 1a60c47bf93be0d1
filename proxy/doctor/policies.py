"""The least that IAM has to allow each role: the store's tables as `needs` has them, Bedrock, and its price list. Pure.

`deploy/iam/write.py` writes what is made from it; `tests/deploy/test_iam.py` holds the files to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from proxy.app import Role
from proxy.doctor.needs import ACTIONS, needs_of
from proxy.forwarding.model_path import Operation

ROLES: tuple[Role, ...] = ("sidecar", "control", "both")
_PREFIX = "price-keeper-"

# What each operation of the data port is called in a policy. Chat completions and asynchronous jobs have no action of
# their own, and bidirectional streams are refused.
OF_OPERATIONS: Mapping[Operation, tuple[str, ...]] = {
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

# Any model, in any region: a label may name several, and an inference profile calls the models behind it.
MODELS = (
    "arn:aws:bedrock:*::foundation-model/*",
    "arn:aws:bedrock:*:*:inference-profile/*",
    "arn:aws:bedrock:*:*:application-inference-profile/*",
)

# What `price-keeper tables create` and `check` do.
_OF_CREATION = (
    "CreateTable",
    "DescribeContinuousBackups",
    "DescribeTable",
    "DescribeTimeToLive",
    "UpdateContinuousBackups",
    "UpdateTimeToLive",
)

Arn = Callable[[str, str], Any]  # of a service, and of what it has
Statement = dict[str, Any]


def _anywhere(service: str, what: str) -> str:
    """In any region, and in whatever account the policy stands."""
    return f"arn:aws:{service}:*:*:{what}"


def policy(role: Role, arn: Arn = _anywhere, prefix: str = _PREFIX, models: Any = MODELS) -> dict[str, Any]:
    calls = () if role == "control" else _of_calls(arn, models)
    return _document([*_of_tables(role, arn, prefix), *calls])


def creation_policy(arn: Arn = _anywhere, prefix: str = _PREFIX) -> dict[str, Any]:
    return _document([_statement("Tables", "dynamodb", _OF_CREATION, [arn("dynamodb", f"table/{prefix}*")])])


def _of_tables(role: Role, arn: Arn, prefix: str) -> Iterable[Statement]:
    for table, needed in needs_of(role).items():
        actions = [action for action in ACTIONS if action in needed]
        yield _statement(_camel(table), "dynamodb", actions, [arn("dynamodb", f"table/{prefix}{table}")])


def _of_calls(arn: Arn, models: Any) -> Iterable[Statement]:
    guardrails = [arn("bedrock", "guardrail/*"), arn("bedrock", "guardrail-profile/*")]
    yield _statement("Models", "bedrock", ("InvokeModel", "InvokeModelWithResponseStream", "CountTokens"), models)
    yield _statement("Jobs", "bedrock", ("InvokeModel", "GetAsyncInvoke"), [arn("bedrock", "async-invoke/*")])
    yield _statement("Guardrails", "bedrock", ("ApplyGuardrail",), guardrails)
    yield _statement("GuardrailChecks", "bedrock", ("InvokeGuardrailChecks",), "*")  # of nothing that has an ARN
    yield _statement("Prices", "pricing", ("GetProducts",), "*")


def _statement(name: str, service: str, actions: Sequence[str], resource: Any) -> Statement:
    told = list(resource) if isinstance(resource, tuple) else resource
    return {"Sid": name, "Effect": "Allow", "Action": [f"{service}:{each}" for each in actions], "Resource": told}


def _document(statements: list[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))
