"""The APIs of OpenAI and Anthropic: which paths are theirs, and the forms of their errors and lists of models. Pure.

Below /openai and /anthropic the path says whose form it is. Below /v1 the header `anthropic-version` does, which every
client of Anthropic sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import orjson

from price_keeper.exchange import Request

OPENAI_PREFIX: Final = b"/openai/v1/"
ANTHROPIC_PREFIX: Final = b"/anthropic/v1/"
_SHARED_PREFIX: Final = b"/v1/"
VENDOR_PREFIXES: Final = (OPENAI_PREFIX, ANTHROPIC_PREFIX, _SHARED_PREFIX)
_VERSION: Final = b"anthropic-version"
_MODELS: Final = b"models"
MESSAGES: Final = ANTHROPIC_PREFIX + b"messages"
COUNT_TOKENS: Final = ANTHROPIC_PREFIX + b"messages/count_tokens"

_OPENAI_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


class ApiForm(Enum):
    """Whose form errors have."""

    AWS = "aws"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def find_form(request: Request) -> ApiForm:
    target = request.target
    if not target.startswith(VENDOR_PREFIXES):
        return ApiForm.AWS
    if target.startswith(_SHARED_PREFIX):
        return ApiForm.ANTHROPIC if _VERSION in request.headers else ApiForm.OPENAI
    return ApiForm.OPENAI if target.startswith(OPENAI_PREFIX) else ApiForm.ANTHROPIC


def replace_alias(form: ApiForm, target: bytes) -> bytes:
    """The target below /openai or /anthropic, for one below /v1."""
    if not target.startswith(_SHARED_PREFIX):
        return target
    prefix = ANTHROPIC_PREFIX if form is ApiForm.ANTHROPIC else OPENAI_PREFIX
    return prefix + target[len(_SHARED_PREFIX) :]


def build_error_document(form: ApiForm, status: int, code: str, message: str) -> dict[str, Any]:
    """The body of an error. `code` is AWS's name for it. OpenAI's form keeps the `message` that it had before."""
    if form is ApiForm.OPENAI:
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}, "message": message}
    if form is ApiForm.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"message": message}


def find_listed_model(path: bytes) -> str | None:
    """The model whose description a path of either API asks for; empty for the list, None for any other path."""
    for prefix in (OPENAI_PREFIX, ANTHROPIC_PREFIX):
        first, slash, model = path[len(prefix) :].partition(b"/")
        if path.startswith(prefix) and first == _MODELS and bool(slash) == bool(model):
            return model.decode("latin-1")
    return None


def build_model(form: ApiForm, name: str) -> dict[str, Any]:
    """One label, as a model. When it was made is not known, so it is the beginning of time."""
    if form is ApiForm.ANTHROPIC:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "price-keeper"}


def build_model_list(form: ApiForm, names: Sequence[str]) -> dict[str, Any]:
    models = [build_model(form, name) for name in names]
    if form is ApiForm.ANTHROPIC:
        return {
            "data": models,
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }
    return {"object": "list", "data": models}


def read_error(headers: dict[bytes, bytes], body: bytes) -> tuple[str, str]:
    """AWS's name of an error and its message, from a response of Bedrock."""
    code = headers.get(b"x-amzn-errortype", b"").partition(b":")[0].decode("latin-1")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    message = document.get("message") or document.get("Message") if isinstance(document, dict) else None
    return code, message if isinstance(message, str) else "Bedrock answered with an error"
