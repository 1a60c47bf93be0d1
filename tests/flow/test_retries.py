"""A client that stops waiting and sends its call again pays once: real boto3, the whole pipeline, a slow Bedrock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config as ClientConfig
from botocore.exceptions import ClientError

from proxy import dataplane
from proxy.auth.keys import SigningKey
from proxy.auth.tokens import Tokens
from proxy.clock import SystemClock
from proxy.config import Address, Config
from proxy.config.keys import Listen
from proxy.forwarding.credentials import FixedCredentials
from proxy.forwarding.forwarder import SignatureV4
from proxy.forwarding.sigv4 import Credentials
from proxy.simulator import DEFAULT_KEYS, SimulatedBedrock, simulated_bedrock
from proxy.stores.sqlite import SqliteStore
from proxy.tasks import Tasks

ORG = "550e8400-e29b-41d4-a716-446655440000"
SECRET = b"a secret that is long enough for HS256"
QUESTION = [{"role": "user", "content": [{"text": "A question with a marker: XYZZY"}]}]


@dataclass
class Rig:
    url: str
    token: str
    bedrock: SimulatedBedrock

    def client(self, read_timeout: float = 60, **headers: str) -> Any:
        client = boto3.session.Session().client(
            "bedrock-runtime",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            aws_session_token=self.token,
            config=ClientConfig(read_timeout=read_timeout, retries={"total_max_attempts": 3}),
        )

        def add(request: Any, **_: Any) -> None:
            for name, value in headers.items():
                request.headers[name.replace("_", "-")] = value

        client.meta.events.register("before-sign.bedrock-runtime", add)
        return client


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    clock = SystemClock()
    base = Config.development()
    config = Config(labels=base.labels, listen=Listen(data=Address("127.0.0.1", 0)))
    tokens = Tokens([SigningKey("k1", "HS256", SECRET, SECRET)], "price-keeper", clock.now)
    store = await SqliteStore(tmp_path / "store.db", clock.now).open()
    async with Tasks(clock) as tasks, simulated_bedrock() as stand_in:
        keys = FixedCredentials(Credentials(DEFAULT_KEYS.access_key, DEFAULT_KEYS.secret_key))
        bedrock = dataplane.Bedrock(stand_in.url, SignatureV4(keys, clock.now), dataplane.SIMULATED_PREFIX)
        pipeline = dataplane.pipeline(config, store, tokens, bedrock, clock, tasks)
        listener, port = await dataplane.listening(pipeline, config, clock, tasks)
        yield Rig(f"http://127.0.0.1:{port}", tokens.mint(ORG, "web").token, stand_in)
        await listener.drain(0.5)
    await store.close()


async def test_a_time_out_and_a_retry_are_one_call_and_one_answer(rig: Rig) -> None:
    client = rig.client(read_timeout=0.5, x_simulate_latency_ms="1200")
    answer = await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert answer["ResponseMetadata"]["RetryAttempts"] >= 1
    assert answer["output"]["message"]["content"][0]["text"]
    assert len(rig.bedrock.ledger) == 1
    assert rig.bedrock.ledger[-1].is_whole


async def test_two_calls_of_one_client_are_two(rig: Rig) -> None:
    client = rig.client()
    for _ in range(2):
        await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert len(rig.bedrock.ledger) == 2


async def test_an_error_is_not_shown_again(rig: Rig) -> None:
    """boto3 repeats what was throttled under the same id, and the second try finds Bedrock well."""
    client = rig.client(x_simulate_fault="throttle", x_simulate_times="1")
    answer = await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert answer["ResponseMetadata"]["RetryAttempts"] == 1
    assert len(rig.bedrock.ledger) == 2


@pytest.mark.parametrize(
    ("model", "code", "tries"),
    [("nothing", "ValidationException", 0), ("premium", "ThrottlingException", 2)],
)
async def test_errors_are_what_boto3_expects(rig: Rig, model: str, code: str, tries: int) -> None:
    client = rig.client(x_simulate_fault="throttle")
    with pytest.raises(ClientError) as refused:
        await asyncio.to_thread(client.converse, modelId=model, messages=QUESTION)
    assert refused.value.response["Error"]["Code"] == code
    assert refused.value.response["ResponseMetadata"]["RetryAttempts"] == tries


async def test_no_token_is_denied_at_once(rig: Rig) -> None:
    client = Rig(rig.url, "no-token", rig.bedrock).client()
    with pytest.raises(ClientError) as refused:
        await asyncio.to_thread(client.converse, modelId="premium", messages=QUESTION)
    assert refused.value.response["Error"]["Code"] == "AccessDeniedException"
    assert refused.value.response["ResponseMetadata"]["RetryAttempts"] == 0
    assert len(rig.bedrock.ledger) == 0


async def test_what_says_who_calls_never_goes_upstream(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.to_thread(rig.client().converse, modelId="premium", messages=QUESTION)
    entry = rig.bedrock.ledger[-1]
    sent = b"\n".join(name + b": " + value for name, value in entry.headers)
    assert rig.token.encode() not in sent
    assert b"any/" not in sent
    assert b"x-amz-security-token" not in sent.lower()
    assert rig.token not in caplog.text
    assert "XYZZY" not in caplog.text


async def test_a_stream_comes_whole_and_a_cut_one_breaks(rig: Rig) -> None:
    def events(client: Any) -> list[Any]:
        return list(client.converse_stream(modelId="standard", messages=QUESTION)["stream"])

    whole = await asyncio.to_thread(events, rig.client())
    assert "metadata" in whole[-1]
    with pytest.raises(Exception, match=r"."):
        await asyncio.to_thread(events, rig.client(x_simulate_fault="cut", x_simulate_after_frames="3"))
