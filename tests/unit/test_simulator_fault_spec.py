"""What a request may wish for: read strictly, planned ahead, and limited in number."""

from __future__ import annotations

import pytest
from bedrock_simulator.aws_errors import AwsError, GatewayError
from bedrock_simulator.fault_spec import FAULTS, HEALTHY, FaultSchedule, parse_fault_spec


def headers(**wishes: str) -> list[tuple[bytes, bytes]]:
    return [(f"X-Simulate-{name.replace('_', '-')}".encode(), value.encode()) for name, value in wishes.items()]


def test_headers_are_read_in_any_case():
    wishes = FaultSchedule().next_spec(
        [(b"Host", b"x"), *headers(Fault="cut", after_bytes="12", cache_write_5m_tokens="7")], ""
    )
    assert (wishes.fault, wishes.after_bytes, wishes.cache_write_5m_tokens) == ("cut", 12, 7)


def test_request_without_fault_headers_is_healthy():
    assert FaultSchedule().next_spec([(b"Host", b"x")], "") is HEALTHY


@pytest.mark.parametrize(
    ("wishes", "complaint"),
    [
        ({"faults": "cut"}, "no wish of the simulator"),
        ({"fault": "explode"}, "one of throttle"),
        ({"after-frames": "two"}, "whole number"),
        ({"after-frames": "-1"}, "whole number"),
        ({"status": "418"}, "one of 500"),
        ({"usage": "some"}, "one of none"),
        ({"tier": "gold"}, "one of default"),
        ({"exception": "ThrottlingException"}, "one of internalServerException"),
    ],
)
def test_invalid_fault_header_is_refused(wishes, complaint):
    with pytest.raises(AwsError, match=complaint):
        parse_fault_spec(wishes)


def test_every_fault_is_error_or_strikes_connection_or_stream():
    errors = {fault for fault in FAULTS if parse_fault_spec({"fault": fault}).build_error() is not None}
    assert errors == {"throttle", "5xx", "model-not-ready", "model-timeout", "model-error", "quota", "access-denied"}


def test_server_error_has_requested_status():
    statuses = {
        status: parse_fault_spec({"fault": "5xx", "status": status}).build_error()
        for status in ("500", "502", "503", "504")
    }
    assert {int(status): error.status for status, error in statuses.items() if error} == {
        500: 500,
        502: 502,
        503: 503,
        504: 504,
    }
    assert isinstance(statuses["502"], GatewayError)
    assert not isinstance(statuses["500"], GatewayError)


def test_fault_with_times_is_limited_per_invocation_id():
    script, asked = FaultSchedule(), headers(fault="throttle", times="2")
    assert [script.next_spec(asked, "one").fault for _ in range(4)] == ["throttle", "throttle", "", ""]
    assert script.next_spec(asked, "another").fault == "throttle"


def test_fault_key_wins_over_invocation_id():
    script, asked = FaultSchedule(), headers(fault="throttle", times="1", key="k")
    assert [script.next_spec(asked, each).fault for each in ("one", "two")] == ["throttle", ""]


def test_planned_faults_are_used_in_order_and_permanent_ones_stay():
    script = FaultSchedule()
    script.set_always({"output_tokens": 5})
    script.plan([{"fault": "throttle"}, {}, {"output-tokens": 9}])
    seen = [script.next_spec([], "") for _ in range(4)]
    assert [(wishes.fault, wishes.output_tokens) for wishes in seen] == [("throttle", 5), ("", 5), ("", 9), ("", 5)]
    assert script.next_spec(headers(output_tokens="3"), "").output_tokens == 3


def test_plan_with_mistake_is_refused_as_a_whole():
    script = FaultSchedule()
    with pytest.raises(AwsError):
        script.plan([{"fault": "throttle"}, {"fault": "nonsense"}])
    assert script.planned == []


def test_memory_of_fault_counts_is_bounded(monkeypatch):
    monkeypatch.setattr("bedrock_simulator.fault_spec._MAX_KEYS", 3)
    script, asked = FaultSchedule(), headers(fault="throttle", times="1")
    for key in "abcd":
        script.next_spec(asked, key)
    assert [script.next_spec(asked, key).fault for key in "dcb"] == ["", "", ""]
    assert script.next_spec(asked, "a").fault == "throttle"
