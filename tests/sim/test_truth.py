"""The check of moves down the chain: by the quotas that the look itself read, and for each label that is left."""

from __future__ import annotations

from zoneinfo import ZoneInfo

import pytest
from price_keeper.budgets import active_label
from price_keeper.domain import PICO_PER_MICRO, Scope
from price_keeper.stores import schema
from price_keeper.stores.contract import Item, Update

from tests.sim.setup import LABELS, ORG
from tests.sim.truth import Name, Reader, Truth

SCOPE, TODAY = Scope(ORG, "web"), "DAY#20261118"
STATE, OF_ORG, OF_APP = (
    schema.sticky_state_key(SCOPE, TODAY),
    schema.org_config_key(ORG),
    schema.app_config_key(ORG, "web"),
)
QUOTAS = {"premium": 2_000, "standard": 10_000, "economy": 1_000_000}  # micro-USD
SPENT = {"premium": 7_000, "standard": 12_000, "economy": 0}
RAISED = {"standard": 30_000}


def settings(**quotas: int) -> Item:
    return {"model_ordering": list(LABELS), "quotas": {**QUOTAS, **quotas}}


@pytest.fixture
def truth() -> Truth:
    truth = Truth(lambda: 0.0, [ZoneInfo("UTC")])
    for label, micros in SPENT.items():
        truth.pico[Name(SCOPE.key, label, TODAY)] = micros * PICO_PER_MICRO
    return truth


@pytest.fixture
def reader(truth: Truth) -> Reader:
    """A process whose last look read the settings above."""
    reader = truth.of_reader("a sidecar")
    reader.heard([STATE, OF_ORG, OF_APP], [None, settings(), {"app_name": "an app"}])
    return reader


def moved(before: str, label: str) -> Update:
    index = LABELS.index(label)
    return Update(
        STATE,
        set={active_label.LABEL_ATTRIBUTE: label, active_label.INDEX_ATTRIBUTE: index, "previous_model_label": before},
    )


def test_move_past_spent_labels_is_right(truth: Truth, reader: Reader) -> None:
    truth.moves(reader, moved("premium", "economy"))
    assert truth.checks == {"a label is left for good when it is spent": 2}
    assert truth.violations == []


def test_quota_read_for_other_purpose_during_refresh_does_not_count(truth: Truth, reader: Reader) -> None:
    """Rate limits read the same items. A refresh that had its settings before does not know of that read."""
    reader.heard([OF_ORG, OF_APP], [settings(**RAISED), None])
    truth.moves(reader, moved("standard", "economy"))
    assert truth.violations == []


def test_quota_not_yet_received_does_not_count(truth: Truth, reader: Reader) -> None:
    """The store has read it, and the answer is still on its way."""
    reader.read([STATE, OF_ORG, OF_APP], 0.0, {})
    truth.moves(reader, moved("standard", "economy"))
    assert truth.violations == []


def test_move_by_quota_older_than_last_refresh_is_wrong(truth: Truth, reader: Reader) -> None:
    reader.heard([STATE, OF_ORG, OF_APP], [None, settings(**RAISED), None])
    truth.moves(reader, moved("standard", "economy"))
    assert len(truth.violations) == 1


def test_quotas_of_app_take_precedence(truth: Truth, reader: Reader) -> None:
    reader.heard([STATE, OF_ORG, OF_APP], [None, settings(), {"quotas": {**QUOTAS, **RAISED}}])
    truth.moves(reader, moved("standard", "economy"))
    assert len(truth.violations) == 1


def test_move_past_unspent_label_is_wrong(truth: Truth, reader: Reader) -> None:
    reader.heard([STATE, OF_ORG, OF_APP], [None, settings(**RAISED), None])
    truth.moves(reader, moved("premium", "economy"))
    assert len(truth.violations) == 1


def test_move_of_process_that_never_refreshed_is_wrong(truth: Truth) -> None:
    truth.moves(truth.of_reader("another sidecar"), moved("premium", "standard"))
    assert len(truth.violations) == 1
