"""Apps that name models in their own way, over real sockets: which label serves, what is called, and at which price."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from bedrock_simulator import DEFAULT_KEYS
from price_keeper.config import Config
from price_keeper.config.config_sections import TierPrices
from price_keeper.upstream import profile_models

from tests.support.clock import ShiftedClock
from tests.support.data_port import DataPort, DataPortResponse, data_port
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE, NOVA, TURN, post

SONNET = "anthropic.claude-sonnet-4-5-20250929-v1:0"
OLDER = "anthropic.claude-3-5-sonnet-20241022-v2:0"
ACCOUNT = "arn:aws:bedrock:us-east-1:123456789012"
UNKNOWN_PROFILE = f"{ACCOUNT}:application-inference-profile/unknown"
LABELS = Config.development().labels
FORMS = (
    SONNET,
    *(f"{prefix}.{SONNET}" for prefix in ("us", "eu", "apac", "amer", "global", "jp", "au", "ca", "us-gov")),
    f"arn:aws:bedrock:eu-west-1::foundation-model/{SONNET}",
    f"arn:aws:bedrock:::foundation-model/{SONNET}",
    f"{ACCOUNT}:inference-profile/eu.{SONNET}",
)


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def port(tmp_path: Path, clock: ShiftedClock) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path, clock=clock) as opened:
        yield opened


async def ask(port: DataPort, model: str) -> DataPortResponse:
    return await port.ask(f"/model/{quote(model, safe='')}/converse", TURN)


def served(answer: DataPortResponse) -> tuple[str, str, str]:
    assert answer.status == 200, answer.body
    return tuple(answer.headers[f"x-price-keeper-{what}"] for what in ("requested", "label", "model"))  # type: ignore[return-value]


def lookups(port: DataPort) -> list[Any]:
    return [entry for entry in port.bedrock.ledger if entry.operation == "GetInferenceProfile"]


async def create(port: DataPort, source: str) -> str:
    """Create an application inference profile in the account that the sidecar calls; returns its ARN."""
    body = {"inferenceProfileName": "shop", "modelSource": {"copyFrom": source}}
    headers = {"authorization": f"Bearer {DEFAULT_KEYS.bearer}"}
    async with aiohttp.ClientSession() as session:
        status, _, raw = await post(session, f"{port.bedrock.url}/inference-profiles", body, **headers)
    assert status == 201, raw
    return str(json.loads(raw)["inferenceProfileArn"])


async def test_every_form_of_model_id_is_served_by_its_label_at_its_price(port: DataPort) -> None:
    cost = 0
    for form in FORMS:
        assert served(await ask(port, form)) == (form, "premium", CLAUDE)
        entry = port.bedrock.ledger[-1]
        assert (entry.model, entry.usage is not None) == (CLAUDE, True)
        cost += (entry.usage.input_tokens * 3 + entry.usage.output_tokens * 15) * 10**6  # type: ignore[union-attr]
    recorded = port.recording.flusher.journal.recorded_by_label
    assert (recorded["premium"].requests, recorded["premium"].pico) == (len(FORMS), cost)
    assert lookups(port) == []


async def test_model_named_in_body_may_have_any_form(port: DataPort) -> None:
    for form in ("us.amazon.nova-lite-v1:0", f"arn:aws:bedrock:us-east-1::foundation-model/{NOVA}"):
        answer = await port.ask(CHAT_PATH, CHAT | {"model": form})
        assert served(answer) == (form, "economy", NOVA)


async def test_other_model_is_refused_in_every_form(port: DataPort) -> None:
    for form in FORMS:
        answer = await ask(port, form.replace("sonnet-4-5", "sonnet-4-6"))
        assert (answer.status, "there is no label for" in answer.message) == (400, True)
    assert list(port.bedrock.ledger) == []


async def test_reload_adds_and_removes_alias(port: DataPort) -> None:
    aliased = {**LABELS, "premium": replace(LABELS["premium"], aliases=(OLDER, "gpt-4o"))}
    names = (OLDER, f"us.{OLDER}", "gpt-4o")
    for labels, status in ((LABELS, 400), (aliased, 200), (LABELS, 400)):
        await port.apply_config(labels=labels)
        assert {(await ask(port, name)).status for name in names} == {status}
    await port.apply_config(labels=aliased)
    assert [served(await ask(port, name)) for name in names] == [(name, "premium", CLAUDE) for name in names]


# Application inference profiles, whose ARN does not say which model they are of.


async def test_application_profile_is_served_by_label_of_its_model(port: DataPort, clock: ShiftedClock) -> None:
    profile = await create(port, f"{ACCOUNT}:inference-profile/us.{SONNET}")
    answers = await asyncio.gather(*(ask(port, profile) for _ in range(5)))
    assert {served(answer) for answer in answers} == {(profile, "premium", CLAUDE)}
    assert len(lookups(port)) == 1  # for all five; the simulator has checked its signature
    clock.ahead += profile_models.PROFILE_SECONDS - 60
    assert served(await ask(port, profile)) == (profile, "premium", CLAUDE)
    assert len(lookups(port)) == 1
    clock.ahead += 120
    assert served(await ask(port, profile)) == (profile, "premium", CLAUDE)
    assert len(lookups(port)) == 2
    paid = [entry.usage for entry in port.bedrock.ledger if entry.usage is not None]
    recorded = port.recording.flusher.journal.recorded_by_label["premium"]
    assert (recorded.requests, recorded.pico) == (
        7,
        sum(usage.input_tokens * 3 + usage.output_tokens * 15 for usage in paid) * 10**6,
    )


async def test_application_profile_of_unlabelled_model_is_refused(port: DataPort) -> None:
    profile = await create(port, f"arn:aws:bedrock:us-east-1::foundation-model/{OLDER}")
    for _ in range(2):
        answer = await ask(port, profile)
        assert (answer.status, "there is no label for" in answer.message) == (400, True)
    assert len(lookups(port)) == 1
    await port.apply_config(labels={**LABELS, "premium": replace(LABELS["premium"], aliases=(OLDER,))})
    assert served(await ask(port, profile)) == (profile, "premium", CLAUDE)


async def test_profile_that_bedrock_does_not_know_is_looked_up_again_after_a_while(
    port: DataPort, clock: ShiftedClock
) -> None:
    for count in (1, 2):
        for _ in range(3):
            answer = await ask(port, UNKNOWN_PROFILE)
            assert (answer.status, "there is no label for" in answer.message) == (400, True)
        assert len(lookups(port)) == count
        clock.ahead += profile_models.FAILURE_SECONDS + 1


async def test_throttled_lookup_is_retried_after_a_while(port: DataPort, clock: ShiftedClock) -> None:
    profile = await create(port, f"{ACCOUNT}:inference-profile/us.{SONNET}")
    port.bedrock.plan({"fault": "throttle"})
    for _ in range(2):
        answer = await ask(port, profile)
        assert (answer.status, answer.headers["retry-after"]) == (503, "10")
    assert len(lookups(port)) == 1
    clock.ahead += profile_models.FAILURE_SECONDS + 1
    assert served(await ask(port, profile)) == (profile, "premium", CLAUDE)


async def test_forbidden_lookup_is_logged_once_with_advice(port: DataPort, caplog: pytest.LogCaptureFixture) -> None:
    port.bedrock.always(fault="access-denied")
    for number in range(3):
        assert (await ask(port, f"{UNKNOWN_PROFILE}{number}")).status == 400
    lines = [record.getMessage() for record in caplog.records if "GetInferenceProfile failed" in record.getMessage()]
    assert len(lines) == 1
    assert "status 403" in lines[0]
    assert "bedrock:GetInferenceProfile" in lines[0]


@pytest.mark.parametrize("fault", ["throttle", "access-denied"])
async def test_profile_without_known_model_is_metered_where_unlabelled_models_are(tmp_path: Path, fault: str) -> None:
    price = TierPrices(*(Decimal(7) for _ in range(5)))
    async with data_port(tmp_path, unlabelled="meter", default_price=price) as port:
        port.bedrock.plan({"fault": fault})
        assert served(await ask(port, UNKNOWN_PROFILE)) == (UNKNOWN_PROFILE, "", UNKNOWN_PROFILE)
        usage = port.bedrock.ledger[-1].usage
        assert usage is not None
        recorded = port.recording.flusher.journal.recorded_by_label["other"]
        assert recorded.pico == (usage.input_tokens + usage.output_tokens) * 7 * 10**6


async def test_profile_of_region_that_is_not_configured_is_not_looked_up(port: DataPort) -> None:
    """Callers choose the ARNs, and each region would get a signer, and a connection to a host of that name."""
    signers = port.forwarder._authorizer._signers  # type: ignore[attr-defined]
    for number in range(20):
        answer = await ask(port, UNKNOWN_PROFILE.replace("us-east-1", f"us-invented-{number}"))
        assert (answer.status, "there is no label for" in answer.message) == (400, True)
    assert list(port.bedrock.ledger) == []
    assert [*signers] == []


async def test_alias_of_application_profile_needs_no_lookup(port: DataPort) -> None:
    aliased = replace(LABELS["premium"], aliases=(UNKNOWN_PROFILE,))
    await port.apply_config(labels={**LABELS, "premium": aliased})
    assert served(await ask(port, UNKNOWN_PROFILE)) == (UNKNOWN_PROFILE, "premium", CLAUDE)
    assert lookups(port) == []


async def test_flood_of_profiles_has_few_lookups_at_once(port: DataPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_models, "MAX_LOOKUPS", 2)
    port.bedrock.always(latency_ms=200)
    answers = await asyncio.gather(*(ask(port, f"{UNKNOWN_PROFILE}{number}") for number in range(10)))
    assert sorted(answer.status for answer in answers) == [400] * 2 + [503] * 8
    assert len(lookups(port)) == 2
