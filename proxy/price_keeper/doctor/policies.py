"""The least that IAM has to allow each role: the store's tables as `needs` has them, Bedrock, and its price list. Pure.

`deploy/iam/write.py` writes what is made from it; `tests/deploy/test_iam.py` holds the files to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from price_keeper.app import Role
from price_keeper.config.keys import DEMO_LABELS
from price_keeper.doctor.needs import ACTIONS, needs_of
from price_keeper.forwarding.model_path import Operation
from price_keeper.metering.aws_price_list import HOME_REGION
from price_keeper.stores.schema import TABLES

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


def _anywhere(service: str, what: str) -> str:
    """In any region, and in whatever account the policy stands."""
    return f"arn:aws:{service}:*:*:{what}"


# Those of the labels that config.yaml and the files in deploy/ begin with, in any region. Whoever has other labels
# names theirs. Who calls an inference profile needs to be allowed it and the model behind it.
_PROFILES = ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "us.amazon.nova-lite-v1:0")
MODELS = (
    *(f"arn:aws:bedrock:*::foundation-model/{label.model}" for label in DEMO_LABELS.values()),
    *(_anywhere("bedrock", f"inference-profile/{name}") for name in _PROFILES),
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


def policy(role: Role, arn: Arn = _anywhere, prefix: str = _PREFIX, models: Any = MODELS) -> dict[str, Any]:
    calls = () if role == "control" else _of_calls(arn, models)
    return _document([*_of_tables(role, arn, prefix), *calls])


def creation_policy(arn: Arn = _anywhere, prefix: str = _PREFIX) -> dict[str, Any]:
    arns = [arn("dynamodb", f"table/{prefix}{table}") for table in TABLES]
    return _document([_statement("Tables", "dynamodb", _OF_CREATION, arns)])


def _of_tables(role: Role, arn: Arn, prefix: str) -> Iterable[Statement]:
    for table, needed in needs_of(role).items():
        actions = [action for action in ACTIONS if action in needed]
        yield _statement(_camel(table), "dynamodb", actions, [arn("dynamodb", f"table/{prefix}{table}")])


def _of_calls(arn: Arn, models: Any) -> Iterable[Statement]:
    guardrails = [arn("bedrock", "guardrail/*"), arn("bedrock", "guardrail-profile/*")]
    yield _statement("Models", "bedrock", ("InvokeModel", "InvokeModelWithResponseStream", "CountTokens"), models)
    yield _statement("Jobs", "bedrock", ("InvokeModel", "GetAsyncInvoke"), [arn("bedrock", "async-invoke/*")])
    yield _statement("Guardrails", "bedrock", ("ApplyGuardrail",), guardrails)
    # These two act on nothing that has an ARN, so AWS takes no other resource for them.
    yield _statement("GuardrailChecks", "bedrock", ("InvokeGuardrailChecks",), "*")
    where = {"StringEquals": {"aws:RequestedRegion": HOME_REGION}}
    yield {**_statement("Prices", "pricing", ("GetProducts",), "*"), "Condition": where}


def _statement(name: str, service: str, actions: Sequence[str], resource: Any) -> Statement:
    told = list(resource) if isinstance(resource, tuple) else resource
    return {"Sid": name, "Effect": "Allow", "Action": [f"{service}:{each}" for each in actions], "Resource": told}


def _document(statements: list[Statement]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": statements}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))
