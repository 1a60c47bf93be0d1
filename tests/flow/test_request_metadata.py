"""Bedrock's invocation logs say who called, where that is wanted: real boto3 through the whole pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st
from price_keeper.config.config_sections import UpstreamConfig
from price_keeper.errors import InvalidRequest
from price_keeper.operations import Operation
from price_keeper.upstream.request_metadata import HEADER, MAX_METADATA_BYTES, add_metadata, build_identity

from tests.support.data_port import APP, ORG, DataPort, data_port
from tests.support.simulated import CLAUDE_BODY, TURN

OURS = {"price-keeper-org": ORG, "price-keeper-app": APP, "price-keeper-label": "premium"}
FORGED = {"price-keeper-org": "another", "Price-Keeper-User": "nobody", "team": "blue"}


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[DataPort]:
    async with data_port(tmp_path, upstream=UpstreamConfig(endpoint="simulated", request_metadata=True)) as opened:
        yield opened


async def called(client: Any, operation: str, **arguments: Any) -> None:
    def call() -> None:
        answer = getattr(client, operation)(modelId="premium", **arguments)
        list(answer.get("stream") or answer.get("body") or ())

    await asyncio.to_thread(call)


def header_of(port: DataPort) -> Any:
    found = [value for name, value in port.bedrock.ledger[-1].headers if name.lower() == HEADER.encode()]
    return json.loads(found[0]) if found else None


def body_of(port: DataPort) -> Any:
    return json.loads(port.bedrock.ledger[-1].body)


@pytest.mark.parametrize("operation", ["converse", "converse_stream"])
async def test_request_metadata_is_in_converse_body(port: DataPort, operation: str) -> None:
    client = port.client(x_amzn_bedrock_request_metadata="{}")
    await called(client, operation, **TURN)
    assert body_of(port) == TURN | {"requestMetadata": OURS}
    await called(client, operation, **TURN, requestMetadata=FORGED)
    assert body_of(port) == TURN | {"requestMetadata": OURS | {"team": "blue"}}
    assert header_of(port) is None


@pytest.mark.parametrize("operation", ["invoke_model", "invoke_model_with_response_stream"])
async def test_request_metadata_is_in_invoke_header(port: DataPort, operation: str) -> None:
    body = json.dumps(CLAUDE_BODY)
    await called(port.client(), operation, body=body)
    assert (header_of(port), port.bedrock.ledger[-1].body) == (OURS, body.encode())
    client = port.client(x_amzn_bedrock_request_metadata=json.dumps(FORGED))
    await called(client, operation, body=body)
    assert header_of(port) == OURS | {"team": "blue"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"a": 1', "the header x-amzn-bedrock-request-metadata is no JSON: "),
        ("[]", "the header x-amzn-bedrock-request-metadata is no JSON object"),
        ('{"a": {"b": "c"}}', "the header x-amzn-bedrock-request-metadata has strings as its values"),
        ('{"a": %s}' % ("[" * 500 + "]" * 500), "the header x-amzn-bedrock-request-metadata has strings as its values"),
        (
            '{"a": "%s"}' % ("x" * MAX_METADATA_BYTES),
            "the header x-amzn-bedrock-request-metadata has at most 32768 bytes",
        ),
        (json.dumps({str(number): "x" for number in range(14)}), "requestMetadata has at most 13 entries here"),
    ],
)
async def test_unmergeable_metadata_is_refused(port: DataPort, given: str, words: str) -> None:
    client = port.client(x_amzn_bedrock_request_metadata=given)
    with pytest.raises(ClientError, match=words) as refused:
        await called(client, "invoke_model", body=json.dumps(CLAUDE_BODY))
    assert refused.value.response["Error"]["Code"] == "ValidationException"
    assert len(port.bedrock.ledger) == 0


async def test_disabled_request_metadata_changes_nothing(tmp_path: Path) -> None:
    async with data_port(tmp_path) as port:
        await called(port.client(), "converse", **TURN, requestMetadata=FORGED)
        assert body_of(port) == TURN | {"requestMetadata": FORGED}


def test_non_ascii_metadata_is_escaped_in_header() -> None:
    said = {"team": "caf\u00e9 \U0001f600", "odd": "a\x7f\tb"}
    given = json.dumps(said).replace("\x7f", "\\u007f")
    ((name, value),), _ = add_metadata(Operation.INVOKE, OURS, [(HEADER, given)], b"")
    assert (name, json.loads(value)) == (HEADER, OURS | said)
    assert value.isascii()
    assert value.isprintable()


BIG = b'{"messages":[],"x":123456789012345678901,"y":%b,"z":{"a":1,"a":2}}' % (b"[" * 2000 + b"]" * 2000)


@pytest.mark.parametrize("metadata", [b"", b',"requestMetadata":{"a":"b"}', b',\n "requestMetadata" : null '])
def test_rest_of_body_is_unchanged(metadata: bytes) -> None:
    body = BIG[:-1] + metadata + b"}"
    _, changed = add_metadata(Operation.CONVERSE, build_identity(ORG, APP, "premium"), [], body)
    assert changed.startswith(BIG[:-1] + b",")
    assert (
        json.loads(changed.removeprefix(BIG[:-1] + b",").join((b"{", b"")))["requestMetadata"].items() >= OURS.items()
    )


values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-(2**80), 2**80)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
entries = st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=9)
theirs = st.fixed_dictionaries({}, optional={"requestMetadata": entries})


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), theirs, st.sampled_from([None, 1]), st.booleans())
def test_only_metadata_of_body_changes(document: Any, metadata: Any, indent: int | None, is_ascii: bool) -> None:
    body = json.dumps(document | metadata, indent=indent, ensure_ascii=is_ascii).encode()
    _, changed = add_metadata(Operation.CONVERSE, build_identity(ORG, APP, "premium"), [], body + b" \n")
    after = json.loads(changed)
    said = after.pop("requestMetadata")
    assert after == {name: value for name, value in document.items() if name != "requestMetadata"}
    kept = {name: text for name, text in metadata.get("requestMetadata", {}).items() if "price-keeper-" not in name}
    assert said == kept | OURS
    assert changed.count(b"price-keeper-org") == 1


def test_escaped_member_name_is_recognised() -> None:
    ours = {"price-keeper-org": ORG, "price-keeper-label": "premium"}
    body = b'{"request\\u004detadata": {"price-keeper-\\u006frg": "forged", "PRICE-KEEPER-App": "x", "a": "b"}}'
    _, changed = add_metadata(Operation.CONVERSE, build_identity(ORG, None, "premium"), [], body)
    assert json.loads(changed) == {"requestMetadata": {"a": "b"} | ours}
    twice = body[:-1] + b',"requestMetadata":{}}'
    with pytest.raises(InvalidRequest, match="the body has 'requestMetadata' more than once"):
        add_metadata(Operation.CONVERSE, ours, [], twice)
