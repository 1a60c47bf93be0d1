"""Finds the operation of a method and path. Path parameters may be percent-encoded or raw. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

_ANY = ""

_ROUTES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("POST", ("model", _ANY, "invoke"), "InvokeModel"),
    ("POST", ("model", _ANY, "invoke-with-response-stream"), "InvokeModelWithResponseStream"),
    ("POST", ("model", _ANY, "converse"), "Converse"),
    ("POST", ("model", _ANY, "converse-stream"), "ConverseStream"),
    ("POST", ("model", _ANY, "count-tokens"), "CountTokens"),
    ("POST", ("guardrail", _ANY, "version", _ANY, "apply"), "ApplyGuardrail"),
    ("POST", ("guardrail-checks", "invoke"), "InvokeGuardrailChecks"),
    ("POST", ("async-invoke",), "StartAsyncInvoke"),
    ("GET", ("async-invoke",), "ListAsyncInvokes"),
    ("GET", ("async-invoke", _ANY), "GetAsyncInvoke"),
    ("POST", ("inference-profiles",), "CreateInferenceProfile"),
    ("GET", ("inference-profiles", _ANY), "GetInferenceProfile"),
    ("POST", ("openai", "v1", "chat", "completions"), "ChatCompletions"),
    ("POST", ("openai", "v1", "responses"), "Responses"),
)

_MODEL_OPERATIONS = frozenset(operation for _, pattern, operation in _ROUTES if pattern[0] == "model")

_CACHE_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Route:
    operation: str
    labels: tuple[str, ...]
    query: str

    @property
    def model(self) -> str:
        """The model in the path; "" if the body names it, or if there is none."""
        return self.labels[0] if self.operation in _MODEL_OPERATIONS else ""


@lru_cache(maxsize=_CACHE_SIZE)
def find_route(method: str, target: str) -> Route | None:
    path, _, query = target.partition("?")
    if not path.startswith("/"):
        return None
    segments = path[1:].split("/")
    for expected_method, pattern, operation in _ROUTES:
        if method == expected_method and len(segments) == len(pattern):
            labels = _match_labels(pattern, segments)
            if labels is not None:
                return Route(operation, labels, query)
    return None


def _match_labels(pattern: tuple[str, ...], segments: list[str]) -> tuple[str, ...] | None:
    """The path parameters, None if the path does not match the pattern."""
    labels = []
    for expected, segment in zip(pattern, segments, strict=True):
        if expected != _ANY:
            if segment != expected:
                return None
        elif not segment:
            return None
        else:
            labels.append(unquote(segment))
    return tuple(labels)
