"""Fields of the bodies of the control API: what is accepted, and what a client reads of each mistake."""

from __future__ import annotations

from typing import Any

import pytest
from price_keeper.control.api_errors import ApiError
from price_keeper.control.body_fields import BodyFields
from price_keeper.control.budget_endpoints import OVERRIDE_BODY
from price_keeper.control.client_endpoints import ROTATION_BODY
from price_keeper.control.page.page_sign_in import SIGN_IN_BODY
from price_keeper.control.token_endpoints import LOGIN_BODY, REFRESH_BODY

OVERRIDE = {"label": "economy", "reason": "a test"}
A_TIME = "expected a time with its zone, as 2026-11-18T15:00:00Z"


def mistakes(fields: BodyFields, body: Any, prefix: str = "") -> dict[str, str]:
    with pytest.raises(ApiError) as refused:
        fields.parse(body, prefix)
    assert (refused.value.status, refused.value.message) == (400, "the body cannot be used")
    return dict(refused.value.details)


@pytest.mark.parametrize(
    ("fields", "body", "field", "message"),
    [
        (ROTATION_BODY, {"grace_hours": 169}, "grace_hours", "expected a whole number from 0 to 168, found 169"),
        (ROTATION_BODY, {"grace_hours": -1}, "grace_hours", "expected a whole number from 0 to 168, found -1"),
        (ROTATION_BODY, {"grace_hours": "24"}, "grace_hours", 'expected a whole number from 0 to 168, found "24"'),
        (OVERRIDE_BODY, OVERRIDE | {"label": "a b"}, "label", 'expected a label, found "a b"'),
        (OVERRIDE_BODY, OVERRIDE | {"label": "economy\n"}, "label", 'expected a label, found "economy\n"'),
        (OVERRIDE_BODY, OVERRIDE | {"reason": ""}, "reason", 'expected 1 to 200 printable characters, found ""'),
        (
            OVERRIDE_BODY,
            OVERRIDE | {"until": 5},
            "until",
            f"{A_TIME}, found 5",
        ),
        (SIGN_IN_BODY, {"kind": "root", "secret": "x"}, "kind", 'expected one of admin, client, found "root"'),
        (REFRESH_BODY, [], "", "expected an object, found []"),
    ],
)
def test_mistake_names_its_field_what_is_allowed_and_what_was_found(
    fields: BodyFields, body: Any, field: str, message: str
) -> None:
    assert mistakes(fields, body) == {field: message}


@pytest.mark.parametrize(
    "until", ["tomorrow", "2026-11-18", "2026-11-18T15:00:00", "2026-11-18t15:00:00z", "2026-02-30T15:00:00Z"]
)
def test_time_without_its_whole_form_is_a_mistake(until: str) -> None:
    assert mistakes(OVERRIDE_BODY, OVERRIDE | {"until": until}).keys() == {"until"}


@pytest.mark.parametrize("value", [True, 1.0, "1", [], {}])
def test_whole_number_is_given_as_one(value: Any) -> None:
    assert mistakes(ROTATION_BODY, {"grace_hours": value}).keys() == {"grace_hours"}


def test_secret_with_a_mistake_is_not_quoted() -> None:
    assert mistakes(LOGIN_BODY, {"client_id": "a", "client_secret": "se same"}) == {
        "client_secret": "expected a secret, found something else"
    }


def test_all_mistakes_are_reported_at_once_below_the_prefix() -> None:
    body = {"client_id": 1, "client_secret": None, "grant": "x"}
    assert mistakes(LOGIN_BODY, body, "items.3.") == {
        "items.3.client_secret": "required, but missing",
        "items.3.grant": "unknown",
        "items.3.client_id": "expected a client id, found 1",
    }


def test_null_is_read_as_a_field_that_is_left_out() -> None:
    assert OVERRIDE_BODY.parse(OVERRIDE | {"who": None, "any": None}) == OVERRIDE
    assert ROTATION_BODY.parse({"grace_hours": 0}) == {"grace_hours": 0}
    assert OVERRIDE_BODY.parse(OVERRIDE | {"until": "1970-01-01T00:00:00Z"})["until"] == 0.0
