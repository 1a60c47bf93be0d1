"""How a request wants to be treated: the `x-simulate-` headers, and a script for callers without them. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from bedrock_simulator.refusals import GatewayTrouble, Refusal, invalid
from bedrock_simulator.usage import SPOILINGS

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

IN_CONNECTION = ("stall", "cut", "reset")  # before the head, or in the body where -after-* says
IN_STREAM = ("bad-crc", "exception-frame")
FAULTS = (*_ERRORS, "5xx", "slow-first-byte", "half-head", *IN_CONNECTION, *IN_STREAM)

_CHOICES: dict[str, tuple[object, ...]] = {
    "fault": ("", *FAULTS),
    "status": (0, *_SERVER_ERRORS, *_GATEWAY_STATUSES),
    "exception": STREAM_EXCEPTIONS,
    "usage": ("", *SPOILINGS),
    "tier": ("", "default", "flex", "priority", "reserved"),
    "performance": ("", "standard", "optimized"),
}

_MOST_KEYS = 10_000  # of failing requests remembered for -times; the oldest fall out
_MOST_PLANNED = 10_000


@dataclass(frozen=True, slots=True)
class Wishes:
    """Each field is a header of its name; its default is that header's absence."""

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
    def strikes_in_body(self) -> bool:
        """Whether the fault waits for the body; `cut` does so even if it is not said where."""
        if self.fault in IN_CONNECTION:
            return self.fault == "cut" or self.after_frames is not None or self.after_bytes is not None
        return self.fault in IN_STREAM

    def error(self) -> Refusal | None:
        """The error that takes the place of an answer, if one is wished for."""
        if self.fault in _ERRORS:
            return Refusal(_ERRORS[self.fault])
        if self.fault != "5xx":
            return None
        status = self.status or 503
        return GatewayTrouble(status) if status in _GATEWAY_STATUSES else Refusal(_SERVER_ERRORS[status])


HEALTHY = Wishes()

_FIELDS = {field.name: field for field in fields(Wishes)}


def read(values: Mapping[str, Any]) -> Wishes:
    """Strict: a wish that is not understood would let a test pass for the wrong reason."""
    chosen: dict[str, Any] = {}
    for written, value in values.items():
        name = written.replace("-", "_")
        if name not in _FIELDS:
            known = ", ".join(sorted(field.replace("_", "-") for field in _FIELDS))
            raise invalid(f"{PREFIX}{written} is no wish of the simulator; it knows {known}")
        chosen[name] = _value(name, value)
    return Wishes(**chosen)


def _value(name: str, value: Any) -> Any:
    parsed: Any = str(value)
    if "int" in str(_FIELDS[name].type):
        if not parsed.isdecimal():
            raise invalid(f"{PREFIX}{name.replace('_', '-')} is a whole number, not {parsed!r}")
        parsed = int(parsed)
    if name in _CHOICES and parsed not in _CHOICES[name]:
        known = ", ".join(str(choice) for choice in _CHOICES[name] if choice)
        raise invalid(f"{PREFIX}{name.replace('_', '-')} is one of {known}, not {parsed!r}")
    return parsed


class Script:
    """What holds for every request, and what holds for the next ones, one each. A request's own headers go first."""

    def __init__(self) -> None:
        self.always: dict[str, Any] = {}
        self._next: deque[dict[str, Any]] = deque()
        self._struck: OrderedDict[str, int] = OrderedDict()

    def plan(self, following: Iterable[Mapping[str, Any]]) -> None:
        """One wish list for each of the next requests, in the order in which they arrive."""
        planned = [dict(wishes) for wishes in following]
        for wishes in planned:
            read(wishes)
        if len(self._next) + len(planned) > _MOST_PLANNED:
            raise invalid(f"at most {_MOST_PLANNED} requests can be planned ahead")
        self._next.extend(planned)

    def hold(self, always: Mapping[str, Any]) -> None:
        read(always)
        self.always = dict(always)

    def clear(self) -> None:
        self.always = {}
        self._next.clear()
        self._struck.clear()

    @property
    def planned(self) -> list[dict[str, Any]]:
        return list(self._next)

    def wishes(self, headers: Iterable[tuple[bytes, bytes]], invocation_id: str) -> Wishes:
        own = {
            name[len(PREFIX) :].lower().decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name[: len(PREFIX)].lower() == _PREFIX
        }
        planned = self._next.popleft() if self._next else {}
        if not own and not planned and not self.always:
            return HEALTHY
        wishes = read({**_dashed(self.always), **_dashed(planned), **own})
        return self._limited(wishes, invocation_id)

    def _limited(self, wishes: Wishes, invocation_id: str) -> Wishes:
        """Without the fault, once as many requests with this key have failed as were to fail."""
        if not wishes.fault or wishes.times is None:
            return wishes
        key = wishes.key or invocation_id
        struck = self._struck.pop(key, 0)
        self._struck[key] = min(struck + 1, wishes.times)
        if len(self._struck) > _MOST_KEYS:
            self._struck.popitem(last=False)
        return wishes if struck < wishes.times else replace(wishes, fault="")


def _dashed(wishes: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in wishes.items()}
