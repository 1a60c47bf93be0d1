"""What `price-keeper dev` prints, pasted: clients as they are find the sidecar, over http and over https."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients import (
    AIOBOTO3,
    AWS_CLI,
    BOTO3,
    BOTO3_OLDER,
    JAVASCRIPT,
    JAVASCRIPT_HTTP1,
    LANGCHAIN,
    STRANDS,
    CallRound,
    Client,
    ask,
)
from tests.support.commands import Sidecar, sidecar

OF_AWS = (BOTO3, BOTO3_OLDER, AIOBOTO3, AWS_CLI, LANGCHAIN, STRANDS, JAVASCRIPT, JAVASCRIPT_HTTP1)
FREE_PORTS = ("--port", "0", "--control-port", "0")
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with sidecar("dev", *FREE_PORTS, folder=tmp_path_factory.mktemp("plain")) as running:
        yield running


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with sidecar("dev", "--tls", *FREE_PORTS, folder=tmp_path_factory.mktemp("encrypted")) as running:
        yield running


def with_session(running: Sidecar) -> dict[str, str]:
    return {name: value for name, value in running.exports.items() if "CONTAINER" not in name}


def with_container(running: Sidecar) -> dict[str, str]:
    return {name: value for name, value in running.exports.items() if name not in KEYS}


def with_bearer(running: Sidecar) -> dict[str, str]:
    exports = running.exports
    token = {"AWS_BEARER_TOKEN_BEDROCK": exports["AWS_SESSION_TOKEN"]}
    return token | {name: value for name, value in exports.items() if name not in KEYS and "CONTAINER" not in name}


@pytest.mark.parametrize("client", OF_AWS, ids=str)
def test_pasted_environment_works_over_http(plain: Sidecar, client: Client) -> None:
    check(client, with_session(plain), with_container(plain))


@pytest.mark.parametrize("client", OF_AWS, ids=str)
def test_pasted_environment_works_over_https(encrypted: Sidecar, client: Client) -> None:
    check(client, with_session(encrypted), with_bearer(encrypted))


def check(client: Client, *environs: dict[str, str]) -> None:
    calls = [ask("premium"), ask("economy", stream=client.streams)]
    for answer in client.play(*(CallRound(environ, calls) for environ in environs)).answers():
        assert answer["output_tokens"] > 0
