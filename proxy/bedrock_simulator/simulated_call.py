"""A parsed request as the operations see it (`SimulatedCall`), and what they return (`SimulatedResponse`).

A response is either one body or an iterator of frames; `usage` is what the call used, whether or not the response
reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson

from bedrock_simulator.aws_errors import malformed_request, validation_error
from bedrock_simulator.fault_spec import FaultSpec
from bedrock_simulator.models import Model
from bedrock_simulator.routes import Route
from bedrock_simulator.usage import Usage, corrupt_usage

JSON = "application/json"
EVENT_STREAM = "application/vnd.amazon.eventstream"
SERVER_SENT_EVENTS = "text/event-stream"

# The content types that SDKs send for a body of bytes without a given type.
_UNSPECIFIED_TYPES = ("", "application/octet-stream", "binary/octet-stream")

TIERS = ("priority", "default", "flex", "reserved")
LATENCIES = ("standard", "optimized")


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    route: Route
    headers: Mapping[str, str]  # case-insensitive
    body: bytes
    fault_spec: FaultSpec

    def parse_body(self) -> dict[str, Any]:
        """The body as a JSON object. Raises AwsError if it is none, or has another content type."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON and kind not in _UNSPECIFIED_TYPES:
            raise validation_error(f"The provided Content-Type is invalid or not supported: {kind}")
        return parse_json_object(self.body)

    def compute_seed(self, model: Model) -> bytes:
        return sha256(b"%s\n%s" % (model.id.encode(), self.body)).digest()

    def render(self, document: dict[str, Any]) -> bytes:
        return orjson.dumps(self.apply_usage_fault(document))

    def apply_usage_fault(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document, with missing or wrong usage if the fault specification says so."""
        return corrupt_usage(document, self.fault_spec.usage) if self.fault_spec.usage else document


@dataclass(slots=True)
class SimulatedResponse:
    """Either a body or frames. `usage` is what the call used, whether or not the response reports it."""

    body: bytes = b""
    frames: Iterator[bytes] | None = None
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": JSON})
    usage: Usage | None = None
    status: int = 200


def parse_json_object(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed_request(f"the body is not JSON ({error})") from None
    if not isinstance(document, dict):
        raise malformed_request("#: expected type: JSONObject")
    return document


def check_choice(value: Any, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise validation_error(f"{name}: {value!r} is not one of {', '.join(allowed)}.")
    return str(value)
