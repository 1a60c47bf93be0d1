"""The operations of Bedrock, and the paths and model ids that select them. Pure.

`parse_path` takes a request path apart as clients spell it; `OperationPath.path` builds the one spelling that is sent
upstream. No legal id contains a percent sign, so an id means one thing whether it arrives raw, percent-encoded, or
encoded twice by a client that was given an encoded one. Ids are decoded at most twice; a third layer is refused.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote

# Bedrock's own limit for a model id.
MAX_ID_CHARS = 2048

ALLOWED_ID = (
    f"an id is 1 to {MAX_ID_CHARS} letters, digits, '.', ':', '_' and '-', "
    "an ARN has single slashes between such parts too, and neither has '..'; it may be percent-encoded once, or twice"
)
ALLOWED_VERSION = "a guardrail's version is DRAFT or a number of at most 8 digits"

# A fleet uses a handful of ids, each in a few encodings. An entry with the longest raw encoding takes 20 kB.
_ID_CACHE_SIZE = 256

_PART = r"(?!\.(?:/|\Z))[A-Za-z0-9.:_-]+"
_VALID_ID = re.compile(rf"(?!.*\.\.)(?:{_PART}|arn:[A-Za-z0-9.:_-]+(?:/{_PART})+)")
_ENCODED = re.compile(r"(?:[A-Za-z0-9.:_/-]|%[0-9A-Fa-f]{2})+")
_VERSION = re.compile(r"DRAFT|[1-9][0-9]{0,7}")


class BodyForm(Enum):
    """Whose form the bodies of an operation have. Readers of usage and hard budgets' request forms follow from it."""

    CONVERSE = "Converse, of any model"
    INVOKE = "the model family's own"
    CHAT = "OpenAI's chat completions"
    RESPONSES = "OpenAI's responses"
    GUARDRAIL = "a guardrail's"
    JOB = "an asynchronous job's"
    COUNT = "a count of tokens"


class Charge(Enum):
    """What Bedrock charges for."""

    TOKENS = "what the model read, wrote and made"
    GUARDRAIL_UNITS = "the units of a guardrail"
    JOB = "the job that it starts"
    NOTHING = "nothing"


class OperationTraits(NamedTuple):
    """What the product knows of an operation; the sets of operations in other modules follow from it."""

    form: BodyForm
    charge: Charge
    actions: tuple[str, ...]  # of IAM, on the model, guardrail or job
    model_key: str = ""  # the member of the body that names the model
    methods: tuple[bytes, ...] = (b"POST",)
    is_served: bool = True


_JSON, _STREAM = ("InvokeModel",), ("InvokeModelWithResponseStream",)


class Operation(Enum):
    """An operation of Bedrock; its value is the template of its path. A new operation is a row here."""

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash is slow on the hot path
    traits: OperationTraits

    def __new__(cls, path: str, traits: OperationTraits) -> Operation:
        operation = object.__new__(cls)
        operation._value_ = path
        operation.traits = traits
        return operation

    INVOKE = "/model/{id}/invoke", OperationTraits(BodyForm.INVOKE, Charge.TOKENS, _JSON)
    INVOKE_STREAM = (
        "/model/{id}/invoke-with-response-stream",
        OperationTraits(BodyForm.INVOKE, Charge.TOKENS, _STREAM),
    )
    INVOKE_BIDIRECTIONAL = (
        "/model/{id}/invoke-with-bidirectional-stream",
        OperationTraits(BodyForm.INVOKE, Charge.TOKENS, (), is_served=False),
    )
    CONVERSE = "/model/{id}/converse", OperationTraits(BodyForm.CONVERSE, Charge.TOKENS, _JSON)
    CONVERSE_STREAM = "/model/{id}/converse-stream", OperationTraits(BodyForm.CONVERSE, Charge.TOKENS, _STREAM)
    COUNT_TOKENS = "/model/{id}/count-tokens", OperationTraits(BodyForm.COUNT, Charge.NOTHING, ("CountTokens",))
    APPLY_GUARDRAIL = (
        "/guardrail/{id}/version/{version}/apply",
        OperationTraits(BodyForm.GUARDRAIL, Charge.GUARDRAIL_UNITS, ("ApplyGuardrail",)),
    )
    CHECK_GUARDRAILS = (
        "/guardrail-checks/invoke",
        OperationTraits(BodyForm.GUARDRAIL, Charge.GUARDRAIL_UNITS, ("InvokeGuardrailChecks",)),
    )
    ASYNC_INVOKES = "/async-invoke", OperationTraits(BodyForm.JOB, Charge.JOB, _JSON, "modelId", (b"POST", b"GET"))
    ASYNC_INVOKE = (
        "/async-invoke/{id}",
        OperationTraits(BodyForm.JOB, Charge.NOTHING, ("GetAsyncInvoke",), methods=(b"GET",)),
    )
    CHAT_COMPLETIONS = (
        "/openai/v1/chat/completions",
        OperationTraits(BodyForm.CHAT, Charge.TOKENS, _JSON + _STREAM, "model"),
    )
    RESPONSES = "/openai/v1/responses", OperationTraits(BodyForm.RESPONSES, Charge.TOKENS, _JSON + _STREAM, "model")
    EMBEDDINGS = (
        "/openai/v1/embeddings",
        OperationTraits(BodyForm.RESPONSES, Charge.TOKENS, (), "model", is_served=False),
    )


def find_operations(form: BodyForm | None = None, charge: Charge | None = None) -> frozenset[Operation]:
    """The operations that are served, of this form and with this charge."""
    return frozenset(
        each
        for each in Operation
        if each.traits.is_served and form in (None, each.traits.form) and charge in (None, each.traits.charge)
    )


class OperationPath(NamedTuple):
    operation: Operation
    id: str = ""  # decoded id of the model, guardrail or async invocation; empty where the path has none
    version: str = ""  # of the guardrail

    @property
    def path(self) -> str:
        """The path as it is sent upstream, in its one canonical encoding."""
        template: str = self.operation.value
        if not self.id:
            return template
        return template.replace("{id}", encode_model_id(self.id)).replace("{version}", self.version)


_MODEL, _GUARDRAIL, _VERSION_MARK, _APPLY, _ASYNC = "/model/", "/guardrail/", "/version/", "/apply", "/async-invoke/"
_MODEL_OPERATIONS = {each.value.rpartition("/")[2]: each for each in Operation if each.value.startswith(_MODEL)}
_FIXED_PATHS = {each.value: OperationPath(each) for each in Operation if "{" not in each.value}


def parse_path(path: str) -> OperationPath | None:
    """The operation and id that a raw path, without its query, selects; None for a path that is none of Bedrock's.

    Raises ValueError for a path of the right form whose id is not allowed.
    """
    if path.startswith(_MODEL):
        # Only the last part is the operation, because a raw ARN contains slashes.
        raw, slash, last = path[len(_MODEL) :].rpartition("/")
        operation = _MODEL_OPERATIONS.get(last)
        return OperationPath(operation, decode_model_id(raw)) if slash and operation else None
    if path.startswith(_ASYNC):
        return OperationPath(Operation.ASYNC_INVOKE, decode_model_id(path[len(_ASYNC) :]))
    if path.startswith(_GUARDRAIL) and path.endswith(_APPLY):
        return _parse_guardrail_path(path[len(_GUARDRAIL) : -len(_APPLY)])
    return _FIXED_PATHS.get(path)


def _parse_guardrail_path(middle: str) -> OperationPath | None:
    raw, mark, version = middle.rpartition(_VERSION_MARK)
    if not mark:
        return None
    if not _VERSION.fullmatch(version):
        raise ValueError(f"{version[:100]!a} is not allowed: {ALLOWED_VERSION}")
    return OperationPath(Operation.APPLY_GUARDRAIL, decode_model_id(raw), version)


@lru_cache(_ID_CACHE_SIZE)
def decode_model_id(raw: str) -> str:
    """Decode the id in a path: a label, a model id of Bedrock or an ARN. Raises ValueError."""
    decoded = raw
    for _layer in range(2):
        if "%" in decoded and _ENCODED.fullmatch(decoded):
            decoded = unquote(decoded)
    return check_model_id(decoded)


@lru_cache(_ID_CACHE_SIZE)
def encode_model_id(model_id: str) -> str:
    """Encode an id for an upstream path: all characters but RFC 3986's unreserved ones are percent-encoded."""
    return quote(check_model_id(model_id), safe="")


def check_model_id(model_id: str) -> str:
    """Return a decoded id unchanged if it is allowed. Raises ValueError."""
    if len(model_id) > MAX_ID_CHARS or not _VALID_ID.fullmatch(model_id):
        raise ValueError(f"{model_id[:100]!a} is not allowed: {ALLOWED_ID}")
    return model_id
