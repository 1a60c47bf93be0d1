"""A hard budget whose answers state their usage wrongly, over real sockets: what was really used, by the simulated
Bedrock's own ledger, never passes the quota.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bedrock_simulator.usage import USAGE_FAULTS
from price_keeper.config import Config
from price_keeper.operations import Operation
from price_keeper.usage.price_table import build_label_price_table, price_usage
from price_keeper.usage.token_usage import Usage

from tests.flow.test_hard_budgets import hard, true_spend
from tests.support.data_port import DataPort

QUOTA_USD = 0.06
QUOTA = round(QUOTA_USD * 10**12)  # in pico-dollars
TOKENS = 470  # of each answer, which are the most that it may have
CALLS, TOGETHER = 40, 8  # the quota pays for eight of them
PREMIUM = Config.development().labels["premium"]
LABELS = {
    "premium": PREMIUM,
    "llama": replace(PREMIUM, model="meta.llama3-70b-instruct-v1:0", format="llama"),
    "titan": replace(PREMIUM, model="amazon.titan-text-express-v1", format="titan"),
    "mistral": replace(PREMIUM, model="mistral.mistral-7b-instruct-v0:2", format="mistral"),
}
TURN = {"messages": [{"role": "user", "content": [{"text": "hi"}]}], "inferenceConfig": {"maxTokens": TOKENS}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS}
CLAUDE = CHAT | {"anthropic_version": "bedrock-2023-05-31"}
LLAMA = {"prompt": "hi", "max_gen_len": TOKENS}
TITAN = {"inputText": "hi", "textGenerationConfig": {"maxTokenCount": TOKENS}}
STREAMED = "invoke-with-response-stream"
CHATS = Operation.CHAT_COMPLETIONS.value[1:]

# A label, a request, and how the responses corrupt their usage.
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    *[("premium", "converse", TURN, how) for how in USAGE_FAULTS],
    *[("premium", "invoke", CLAUDE, how) for how in USAGE_FAULTS],
    *[("llama", "invoke", LLAMA, how) for how in ("no-output", "zero", "negative")],
    *[("titan", "invoke", TITAN, how) for how in ("no-output", "zero-output", "text")],
    *[("mistral", "invoke", {"prompt": "hi", "max_tokens": TOKENS}, how) for how in ("no-output", "zero")],
    *[(label, "converse", TURN, "zero") for label in ("llama", "mistral")],
    *[("premium", CHATS, CHAT | {"model": "premium"}, how) for how in ("zero", "no-output", "doubled")],
    *[("premium", "converse-stream", TURN, how) for how in ("none", "zero", "negative", "zero-output")],
    *[("premium", STREAMED, CLAUDE, how) for how in ("none", "zero", "no-output", "zero-output")],
    *[("llama", STREAMED, LLAMA, how) for how in ("zero", "no-output")],
]


def truly_used(port: DataPort, label: str) -> int:
    used = [entry.usage for entry in port.bedrock.ledger if entry.usage is not None]
    tariff = build_label_price_table(port.config.labels[label])
    return sum(price_usage(tariff, Usage(each.input_tokens, each.output_tokens)).pico for each in used)


async def spent(folder: Path, label: str, path: str, body: dict[str, Any], how: str) -> tuple[int, int]:
    """What was really used, and what was recorded, after more calls than the quota can pay for."""
    url = f"/{path}" if "/" in path else f"/model/{label}/{path}"
    async with hard(folder, {label: QUOTA_USD}, labels=LABELS) as port, aiohttp.ClientSession() as session:
        port.bedrock.always(usage=how, output_tokens=TOKENS)
        headers = {"Authorization": f"Bearer {port.token}", "Content-Type": "application/json"}

        async def call() -> int:
            async with session.post(port.url + url, headers=headers, data=json.dumps(body)) as answer:
                await answer.read()
                return answer.status

        statuses = [await call()]
        for _ in range(CALLS // TOGETHER):
            statuses += await asyncio.gather(*(call() for _ in range(TOGETHER)))
        assert statuses[0] == 200
        assert {*statuses} <= {200, 400, 429}
        assert await call() == 400
        return truly_used(port, label), await true_spend(port, label)


@pytest.mark.parametrize(("label", "path", "body", "how"), CASES)
async def test_corrupted_usage_does_not_pass_spent_hard_budget(
    tmp_path: Path, label: str, path: str, body: dict[str, Any], how: str
) -> None:
    used, recorded = await spent(tmp_path, label, path, body, how)
    assert 0 < used <= QUOTA
    assert recorded >= used
    assert how == "doubled" or recorded <= QUOTA
