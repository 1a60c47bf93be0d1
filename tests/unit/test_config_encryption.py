"""Plain http to another machine is refused, wherever the address comes from, unless it is allowed beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from price_keeper.cli.store_selection import load_config_at
from price_keeper.config.config_sections import parse_config
from price_keeper.config.value_checks import is_plain_remote
from price_keeper.errors import ConfigError, StoreMisconfigured
from price_keeper.stores.dynamodb import DynamoStore
from price_keeper.usage.price_list_client import AwsPriceList, PriceListUnreadable

from tests.support.commands import call_in_process
from tests.support.configs import LABELS, label, problems, read

COMPLAINT = "plain http to another machine shows what is sent to everybody on the way: give https"
BESIDE = f"{COMPLAINT}, or allow_insecure: true beside it"
REMOTE = "http://bedrock.example:8000"
ON_DYNAMODB = "store: {engine: dynamodb}\nupstream: {endpoint: simulated}\n"


@pytest.mark.parametrize("section", ["upstream", "store"])
@pytest.mark.parametrize("url", [REMOTE, "http://10.0.0.1", "http://a:1", "http://127.0.0.1.example", "http://[::2]"])
def test_plain_http_endpoint_is_refused_unless_allowed(section: str, url: str) -> None:
    assert problems(f"{section}: {{endpoint: '{url}'}}{LABELS}") == [f"config.yaml:1: {section}.endpoint: {BESIDE}"]
    assert getattr(read(f"{section}: {{endpoint: '{url}', allow_insecure: true}}"), section).endpoint == url


@pytest.mark.parametrize("section", ["upstream", "store"])
@pytest.mark.parametrize("url", ["http://localhost:8000", "http://[::1]:80", "http://127.0.0.2", "https://10.0.0.1"])
def test_loopback_and_https_endpoints_need_no_permission(section: str, url: str) -> None:
    assert getattr(read(f"{section}: {{endpoint: '{url}'}}"), section).endpoint == url


def test_plain_http_endpoint_of_a_label_is_refused_unless_allowed() -> None:
    place = f"region: us-east-1, endpoint: '{REMOTE}'"
    assert problems(label(f"    endpoints: [{{{place}}}]")) == [
        f"config.yaml:6: labels.one.endpoints.0.endpoint: {BESIDE}"
    ]
    assert problems("upstream: {allow_insecure: true}\n" + label(f"    endpoints: [{{{place}}}]"))
    allowed = parse_config(label(f"    endpoints: [{{{place}, allow_insecure: true}}]"), "config.yaml", {})
    assert allowed.labels["one"].endpoints[0].endpoint == REMOTE


@pytest.mark.parametrize("section", ["UPSTREAM", "STORE"])
def test_plain_http_from_an_override_is_refused_unless_allowed(section: str) -> None:
    given = {f"PRICE_KEEPER__{section}__ENDPOINT": REMOTE}
    name = section.lower()
    assert problems(LABELS, given) == [f"PRICE_KEEPER__{section}__ENDPOINT: {name}.endpoint: {BESIDE}"]
    allowed = given | {f"PRICE_KEEPER__{section}__ALLOW_INSECURE": "true"}
    assert getattr(read("", allowed), name).endpoint == REMOTE


@pytest.mark.parametrize(
    ("text", "variable", "key"),
    [
        (ON_DYNAMODB, "AWS_ENDPOINT_URL_DYNAMODB", "store"),
        (ON_DYNAMODB, "AWS_ENDPOINT_URL", "store"),
        (ON_DYNAMODB, "AWS_ENDPOINT_URL_STS", "upstream"),
        ("", "AWS_ENDPOINT_URL_PRICING", "upstream"),
        ("", "AWS_ENDPOINT_URL", "upstream"),
    ],
)
def test_plain_http_from_an_aws_variable_is_refused_unless_allowed(text: str, variable: str, key: str) -> None:
    assert problems(text + LABELS, {variable: REMOTE}) == [f"{variable}: {COMPLAINT}, or {key}.allow_insecure: true"]
    everywhere = {f"PRICE_KEEPER__{name}__ALLOW_INSECURE": "true" for name in ("STORE", "UPSTREAM")}
    read(text, {variable: REMOTE} | everywhere)


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        (ON_DYNAMODB, {"AWS_ENDPOINT_URL_DYNAMODB": "http://127.0.0.1:8000"}),
        (ON_DYNAMODB, {"AWS_ENDPOINT_URL_DYNAMODB": REMOTE, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}),
        ("store: {engine: dynamodb, endpoint: 'https://d.example'}\n", {"AWS_ENDPOINT_URL_DYNAMODB": REMOTE}),
        ("", {"AWS_ENDPOINT_URL_DYNAMODB": REMOTE}),  # on SQLite no call goes to DynamoDB
        ("upstream: {endpoint: simulated}\n", {"AWS_ENDPOINT_URL": REMOTE}),
        ("", {"AWS_ENDPOINT_URL_BEDROCK_RUNTIME": REMOTE}),  # where applications send their calls; not read here
    ],
)
def test_aws_variables_with_local_or_unused_url_are_accepted(text: str, variables: dict[str, str]) -> None:
    read(text, variables)


@pytest.mark.parametrize(
    "url", ["dynamodb.internal:8000", "ftp://a.example", "a.example", "https://[bad", "https:///x"]
)
def test_aws_variable_with_malformed_url_is_refused_by_name(url: str) -> None:
    name = "AWS_ENDPOINT_URL_DYNAMODB"
    assert problems(ON_DYNAMODB + LABELS, {name: url}) == [f"{name}: expected http(s)://host or http(s)://host:port"]


async def test_malformed_url_in_shared_aws_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "aws"
    shared.write_text("[default]\nendpoint_url = dynamodb.internal:8000\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(shared))
    with pytest.raises(StoreMisconfigured, match="the address of DynamoDB: Invalid endpoint"):
        await DynamoStore(region="us-east-1", table_prefix="p-", endpoint=None, sleep=_no_wait).open()


async def test_plain_http_from_the_shared_aws_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which botocore alone reads, so that nothing else knows of it before there is a client."""
    shared = tmp_path / "aws"
    shared.write_text(f"[default]\nendpoint_url = {REMOTE}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(shared))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with pytest.raises(StoreMisconfigured, match=f"the address of DynamoDB: {COMPLAINT}.*store.allow_insecure: true"):
        await DynamoStore(region="us-east-1", table_prefix="p-", endpoint=None, sleep=_no_wait).open()
    with pytest.raises(PriceListUnreadable, match=f"{COMPLAINT}.*upstream.allow_insecure: true"):
        await AwsPriceList().probe()
    allowed = DynamoStore(region="us-east-1", table_prefix="p-", endpoint=None, sleep=_no_wait, allow_insecure=True)
    await (await allowed.open()).close()


async def _no_wait(_: float) -> None: ...


@pytest.mark.parametrize("command", [("check-config",), ("serve",), ("doctor",), ("tables", "check")])
def test_every_command_refuses_plain_http(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "config.yaml").write_text(f"upstream: {{endpoint: '{REMOTE}'}}{LABELS}")
    refused = call_in_process(*command, folder=tmp_path)
    assert (refused.returncode, BESIDE in refused.stderr) == (2, True), refused.stderr
    assert REMOTE not in refused.stderr
    with pytest.raises(ConfigError):
        load_config_at(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("url", "is_so"),
    [
        ("http://a.example/path", True),
        ("HTTP://a.example", True),
        ("http://user@127.0.0.1", True),
        ("http:a.example", True),
        (" http://a.example", True),  # a client skips what stands before it,
        ("\x01http://a.example", True),
        ("//a.example:8000", True),  # and takes this for http
        ("//127.0.0.1:8000", False),
        (" https://a.example", False),
        ("https://a.example", False),
        ("http://127.0.0.1:1/path", False),
        ("simulated", False),
        ("", False),
    ],
)
def test_plain_remote_address_is_recognised(url: str, is_so: bool) -> None:
    assert is_plain_remote(url) is is_so


@pytest.mark.parametrize("odd", [" {}", "\x01{}"])
async def test_oddly_written_dynamodb_address_is_refused_when_client_is_made(odd: str) -> None:
    for address in (REMOTE, REMOTE.removeprefix("http:")):
        store = DynamoStore(region="us-east-1", table_prefix="x-", endpoint=odd.format(address), sleep=_no_wait)
        with pytest.raises(StoreMisconfigured, match="plain http to another machine"):
            await store.open()
