"""Under which label a model is counted that has none: one that can be read, and that no other model has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from price_keeper.domain import is_label
from price_keeper.usage.meter_factory import build_model_label

from tests.support.effort import tries

ARN = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123"
LONG = "vendor." + "very-long-name-" * 5


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("amazon.nova-lite-v1:0", "unlabelled.amazon.nova-lite-v1_0"),
        ("us.anthropic.claude-opus-4-8", "unlabelled.us.anthropic.claude-opus-4-8"),
        ("m", "unlabelled.m"),
    ],
)
def test_label_of_plain_model_id_is_the_id(model: str, label: str) -> None:
    assert build_model_label(model) == label


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("vendor.m-v1:0", "vendor.m-v1-0"),
        ("vendor.m-v1:0", "vendor.m-v1_0"),
        ("a.b", "a..b"),
        ("a.b", "a.b-"),
        ("m", "-m"),
        ("a:b", "a/a:b"),
        (LONG + "1", LONG + "2"),
        (ARN, ARN.replace("1234", "9999")),
        (ARN, "abc123"),
        ("---", "..."),
        (build_model_label(ARN).removeprefix("unlabelled."), ARN),
    ],
)
def test_two_models_never_share_a_label(one: str, other: str) -> None:
    assert build_model_label(one) != build_model_label(other)
    assert is_label(build_model_label(one))
    assert is_label(build_model_label(other))


NAMES = st.text("ab.:-_/", max_size=70)


@settings(max_examples=tries(300))
@given(NAMES, NAMES)
def test_random_models_never_share_a_label(one: str, other: str) -> None:
    assert (build_model_label(one) == build_model_label(other)) is (one == other)
    assert is_label(build_model_label(one))


def test_label_of_long_name_keeps_readable_part() -> None:
    assert build_model_label(ARN).startswith("unlabelled.abc123__")
    assert build_model_label(LONG).startswith("unlabelled.vendor-very-long-name-very-long")
    assert len(build_model_label(LONG)) <= 64
