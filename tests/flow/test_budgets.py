"""A budget's whole story over real sockets with boto3: dearest first, then cheaper, then refused, then a new day."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import fields
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from botocore.exceptions import ClientError
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.config.config_sections import GuardrailsConfig, UnitPrices
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value

from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.simulated import CLAUDE_BODY, TURN

ZONE = "Asia/Kolkata"


class SettableClock(SystemClock):
    """The wall clock of this machine, set to another time; the monotonic clock runs as usual."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def now(self) -> float:
        return time.time() + self._ahead

    def set(self, to: float) -> None:
        self._ahead = to - time.time()


def asked(port: DataPort, label: str = "premium") -> dict[str, Any]:
    """The headers of our own on the answer."""
    client = port.client()
    try:
        answer = client.converse(modelId=label, **TURN)
    finally:
        client.close()
    return answer["ResponseMetadata"]["HTTPHeaders"]  # type: ignore[no-any-return]


def served(port: DataPort, label: str = "premium") -> str:
    return str(asked(port, label)["x-price-keeper-label"])


async def configured(port: DataPort, **attributes: Value) -> None:
    await port.store.put(Put(schema.org_config_key(ORG), attributes))


def quotas(**usd: float) -> dict[str, Value]:
    micros: dict[str, Value] = {label: round(amount * 10**6) for label, amount in usd.items()}
    return {"model_ordering": list(usd), "quotas": micros}


async def test_budget_falls_back_then_refuses_then_resets_next_day(tmp_path: Path) -> None:
    clock = SettableClock()
    noon = datetime(2026, 11, 18, 12, tzinfo=ZoneInfo(ZONE)).timestamp()
    clock.set(noon)
    async with data_port(tmp_path, clock=clock) as port:
        # Each label's quota is spent by its second answer.
        await configured(port, timezone=ZONE, **quotas(premium=0.0001, standard=0.0001, economy=0.000001))
        labels = []
        while True:
            try:
                headers = await asyncio.to_thread(asked, port)
            except ClientError as failure:
                refused = failure
                break
            labels.append(headers["x-price-keeper-label"])
            assert headers["x-price-keeper-requested"] == "premium"
            assert headers["x-price-keeper-mode"] in ("NORMAL", "TIGHT")
            assert 0 <= int(headers["x-price-keeper-quota-pct"]) < 100
        assert list(dict.fromkeys(labels)) == ["premium", "standard", "economy"]
        _is_refused_once(refused)
        calls = len(port.bedrock.ledger)
        assert calls == len(labels)  # what is refused goes nowhere
        midnight = datetime(2026, 11, 19, tzinfo=ZoneInfo(ZONE)).timestamp()
        clock.set(midnight - 5)
        with pytest.raises(ClientError):
            await asyncio.to_thread(served, port)
        clock.set(midnight)
        assert await asyncio.to_thread(served, port) == "premium"


def _is_refused_once(failure: ClientError) -> None:
    answer: Any = failure.response
    assert answer["Error"]["Code"] == "ServiceQuotaExceededException"
    message = answer["Error"]["Message"]
    assert message.startswith(f"app {APP} of org {ORG} has used today's budget: premium $0.0")
    assert " of $0.0001, " in message
    assert message.endswith(f"; it resets at 00:00 {ZONE}")
    metadata = answer["ResponseMetadata"]
    assert metadata["RetryAttempts"] == 0
    assert metadata["HTTPHeaders"]["x-should-retry"] == "false"
    assert metadata["HTTPHeaders"]["x-price-keeper-mode"] == "EXCEEDED"
    assert metadata["HTTPHeaders"]["x-price-keeper-requested"] == "premium"


async def test_cheaper_requested_label_is_served(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await configured(port, **quotas(premium=100, standard=100, economy=100))
        assert await asyncio.to_thread(served, port, "economy") == "economy"
        economy = Config.development().labels["economy"].model
        assert await asyncio.to_thread(served, port, economy) == "economy"
        assert await asyncio.to_thread(served, port, "premium") == "premium"


async def test_claude_body_never_falls_back_to_other_format(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await configured(port, **quotas(premium=0, economy=100))
        client = port.client()
        with pytest.raises(ClientError, match=r"no label with a body in the format anthropic .* economy \(nova\)"):
            await asyncio.to_thread(client.invoke_model, modelId="premium", body=json.dumps(CLAUDE_BODY))
        client.close()
        assert list(port.bedrock.ledger) == []


async def test_label_outside_scope_is_refused(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await configured(port, **quotas(premium=100))
        with pytest.raises(ClientError, match=r"economy is not among the labels that .* has a quota for: premium"):
            await asyncio.to_thread(served, port, "economy")


async def test_shadow_mode_reports_label_it_would_serve(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await configured(port, enforcement="shadow", **quotas(premium=0, standard=100))
        headers = await asyncio.to_thread(asked, port)
        assert headers["x-price-keeper-label"] == "premium"
        assert headers["x-price-keeper-mode"] == "EXCEEDED"
        assert headers["x-price-keeper-shadow-label"] == "standard"


@pytest.mark.parametrize(
    ("micros", "why"),
    [
        ({"premium": 10**8, "guardrails": 0}, r"has used today's guardrails budget of \$0\.00;"),
        ({"premium": 10**8}, "guardrails is not among the labels that"),
    ],
)
async def test_guardrails_have_their_own_quota(tmp_path: Path, micros: dict[str, Value], why: str) -> None:
    """Without one, a budget could be passed by through them."""
    prices = GuardrailsConfig(UnitPrices(*[Decimal("0.15")] * len(fields(UnitPrices))))
    async with data_port(tmp_path, guardrails=prices) as port:
        await configured(port, model_ordering=["premium"], quotas=micros)
        client = port.client()
        with pytest.raises(ClientError, match=why):
            await asyncio.to_thread(
                client.apply_guardrail,
                guardrailIdentifier="g",
                guardrailVersion="1",
                source="INPUT",
                content=[{"text": {"text": "hello"}}],
            )
        client.close()


async def test_token_counting_and_job_queries_need_no_budget(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await configured(port, **quotas(premium=0))
        client = port.client()
        counted = await asyncio.to_thread(client.count_tokens, modelId="premium", input={"converse": TURN})
        client.close()
        assert counted["inputTokens"] > 0


async def test_day_of_clock_change_ends_at_local_midnight(tmp_path: Path) -> None:
    """The day on which the clocks go back has 25 hours."""
    clock = SettableClock()
    clock.set(datetime(2026, 11, 1, 3, 59, 30, tzinfo=UTC).timestamp())  # half a minute before midnight in New York
    async with data_port(tmp_path, clock=clock) as port:
        await configured(port, timezone="America/New_York", **quotas(premium=0))
        refused = await port.ask("/model/premium/converse", TURN)
        assert refused.body["message"].endswith("it resets at 00:00 America/New_York")
        assert refused.body["details"]["resets_at"] == "2026-11-01T04:00:00Z"
        clock.set(datetime(2026, 11, 1, 4, 0, 1, tzinfo=UTC).timestamp())
        refused = await port.ask("/model/premium/converse", TURN)
        assert refused.body["details"]["resets_at"] == "2026-11-02T05:00:00Z"
