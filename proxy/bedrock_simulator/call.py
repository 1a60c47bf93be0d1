"""A request as the operations see it, and the answer they give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson

from bedrock_simulator.models import Model
from bedrock_simulator.refusals import invalid, malformed
from bedrock_simulator.routes import Route
from bedrock_simulator.usage import Usage, corrupt_usage
from bedrock_simulator.wishes import FaultSpec

JSON = "application/json"
EVENT_STREAM = "application/vnd.amazon.eventstream"
SERVER_SENT = "text/event-stream"

# What SDKs call a body that they were given as bytes, when nobody told them what it is.
_UNTOLD_TYPES = ("", "application/octet-stream", "binary/octet-stream")

TIERS = ("priority", "default", "flex", "reserved")
LATENCIES = ("standard", "optimized")


@dataclass(frozen=True, slots=True)
class Call:
    route: Route
    headers: Mapping[str, str]  # found by any spelling of their names
    body: bytes
    fault_spec: FaultSpec

    def document(self) -> dict[str, Any]:
        """The body as a JSON object; refused if it is none, or is said to be something else."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON and kind not in _UNTOLD_TYPES:
            raise invalid(f"The provided Content-Type is invalid or not supported: {kind}")
        return parsed(self.body)

    def seed(self, model: Model) -> bytes:
        return sha256(b"%s\n%s" % (model.id.encode(), self.body)).digest()

    def rendered(self, document: dict[str, Any]) -> bytes:
        return orjson.dumps(self.told(document))

    def told(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document, or one whose usage is missing or wrong, if that was wished for."""
        return corrupt_usage(document, self.fault_spec.usage) if self.fault_spec.usage else document


@dataclass(slots=True)
class Answer:
    """Either a body or frames; `usage` is what the call cost, whether or not the answer tells."""

    body: bytes = b""
    frames: Iterator[bytes] | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": JSON})
    usage: Usage | None = None
    status: int = 200


def parsed(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed(f"the body is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise malformed("#: expected type: JSONObject")
    return document


def chosen(value: Any, known: tuple[str, ...], name: str) -> str:
    if value not in known:
        raise invalid(f"{name}: {value!r} is not one of {', '.join(known)}.")
    return str(value)
