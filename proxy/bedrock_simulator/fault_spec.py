"""Requested faults, pacing and usage: the `x-simulate-` headers, and a schedule for callers without them. Pure.

`parse_fault_spec` is strict: an unknown header or value is an error, so that a misspelt fault cannot let a test pass.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bedrock_simulator.aws_errors import AwsError, GatewayError, validation_error
from bedrock_simulator.usage import USAGE_FAULTS

PREFIX = "x-simulate-"
_PREFIX = PREFIX.encode()

INVOCATION_ID = "amz-sdk-invocation-id"

_ERRORS = {
    "throttle": "ThrottlingException",
    "model-not-ready": "ModelNotReadyException",
    "model-timeout": "ModelTimeoutException",
    "model-error": "ModelErrorException",
    "quota": "ServiceQuotaExceededException",
    "access-denied": "AccessDeniedException",
}
_SERVER_ERRORS = {500: "InternalServerException", 503: "ServiceUnavailableException"}
_GATEWAY_STATUSES = (502, 504)

STREAM_EXCEPTIONS = (
    "internalServerException",
    "modelStreamErrorException",
    "modelTimeoutException",
    "serviceUnavailableException",
    "throttlingException",
    "validationException",
)

CONNECTION_FAULTS = ("stall", "cut", "reset")  # before the head, or in the body where -after-* says
STREAM_FAULTS = ("bad-crc", "exception-frame")
FAULTS = (*_ERRORS, "5xx", "slow-first-byte", "half-head", *CONNECTION_FAULTS, *STREAM_FAULTS)

_ALLOWED_VALUES: dict[str, tuple[object, ...]] = {
    "fault": ("", *FAULTS),
    "status": (0, *_SERVER_ERRORS, *_GATEWAY_STATUSES),
    "exception": STREAM_EXCEPTIONS,
    "usage": ("", *USAGE_FAULTS),
    "tier": ("", "default", "flex", "priority", "reserved"),
    "performance": ("", "standard", "optimized"),
}

_MAX_KEYS = 10_000  # of failing requests, kept for -times; the oldest are dropped
_MAX_PLANNED = 10_000


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """The options of one request. Each field is the header of the same name; the default means no header."""

    fault: str = ""
    status: int = 0
    exception: str = "modelStreamErrorException"
    after_frames: int | None = None
    after_bytes: int | None = None
    delay_ms: int | None = None
    times: int | None = None
    key: str = ""
    latency_ms: int | None = None
    frame_ms: int = 0
    output_tokens: int | None = None
    input_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_5m_tokens: int | None = None
    cache_write_1h_tokens: int | None = None
    usage: str = ""
    tier: str = ""
    performance: str = ""

    @property
    def is_body_fault(self) -> bool:
        """Whether the fault occurs in the body; `cut` does even without a position."""
        if self.fault in CONNECTION_FAULTS:
            return self.fault == "cut" or self.after_frames is not None or self.after_bytes is not None
        return self.fault in STREAM_FAULTS

    def build_error(self) -> AwsError | None:
        """The error that replaces the response, if the fault is one."""
        if self.fault in _ERRORS:
            return AwsError(_ERRORS[self.fault])
        if self.fault != "5xx":
            return None
        status = self.status or 503
        return GatewayError(status) if status in _GATEWAY_STATUSES else AwsError(_SERVER_ERRORS[status])


HEALTHY = FaultSpec()

_FIELDS = {field.name: field for field in fields(FaultSpec)}


def parse_fault_spec(values: Mapping[str, Any]) -> FaultSpec:
    """Strict: an ignored option would let a test pass for the wrong reason."""
    field_values: dict[str, Any] = {}
    for given_name, value in values.items():
        name = given_name.replace("-", "_")
        if name not in _FIELDS:
            known_names = ", ".join(sorted(field.replace("_", "-") for field in _FIELDS))
            raise validation_error(f"{PREFIX}{given_name} is no wish of the simulator; it knows {known_names}")
        field_values[name] = _parse_value(name, value)
    return FaultSpec(**field_values)


def _parse_value(name: str, value: Any) -> Any:
    parsed: Any = str(value)
    if "int" in str(_FIELDS[name].type):
        if not parsed.isdecimal():
            raise validation_error(f"{PREFIX}{name.replace('_', '-')} is a whole number, not {parsed!r}")
        parsed = int(parsed)
    if name in _ALLOWED_VALUES and parsed not in _ALLOWED_VALUES[name]:
        allowed_values = ", ".join(str(choice) for choice in _ALLOWED_VALUES[name] if choice)
        raise validation_error(f"{PREFIX}{name.replace('_', '-')} is one of {allowed_values}, not {parsed!r}")
    return parsed


class FaultSchedule:
    """Options for every request, and a queue of options for the next ones. A request's own headers have precedence."""

    def __init__(self) -> None:
        self.always: dict[str, Any] = {}
        self._next: deque[dict[str, Any]] = deque()
        self._failures_by_key: OrderedDict[str, int] = OrderedDict()

    def plan(self, specs: Iterable[Mapping[str, Any]]) -> None:
        """Queue one set of options for each of the next requests, in the order of their arrival."""
        planned = [dict(spec) for spec in specs]
        for spec in planned:
            parse_fault_spec(spec)
        if len(self._next) + len(planned) > _MAX_PLANNED:
            raise validation_error(f"at most {_MAX_PLANNED} requests can be planned ahead")
        self._next.extend(planned)

    def set_always(self, always: Mapping[str, Any]) -> None:
        parse_fault_spec(always)
        self.always = dict(always)

    def clear(self) -> None:
        self.always = {}
        self._next.clear()
        self._failures_by_key.clear()

    @property
    def planned(self) -> list[dict[str, Any]]:
        return list(self._next)

    def next_spec(self, headers: Iterable[tuple[bytes, bytes]], invocation_id: str) -> FaultSpec:
        own_values = {
            name[len(PREFIX) :].lower().decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name[: len(PREFIX)].lower() == _PREFIX
        }
        planned_values = self._next.popleft() if self._next else {}
        if not own_values and not planned_values and not self.always:
            return HEALTHY
        spec = parse_fault_spec({**_with_dashes(self.always), **_with_dashes(planned_values), **own_values})
        return self._apply_times(spec, invocation_id)

    def _apply_times(self, spec: FaultSpec, invocation_id: str) -> FaultSpec:
        """Remove the fault once `times` requests with this key have failed."""
        if not spec.fault or spec.times is None:
            return spec
        key = spec.key or invocation_id
        failures = self._failures_by_key.pop(key, 0)
        self._failures_by_key[key] = min(failures + 1, spec.times)
        if len(self._failures_by_key) > _MAX_KEYS:
            self._failures_by_key.popitem(last=False)
        return spec if failures < spec.times else replace(spec, fault="")


def _with_dashes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in values.items()}
