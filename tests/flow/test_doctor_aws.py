"""`price-keeper doctor` before what stands in for AWS: tables, permissions, clocks, credentials, Bedrock, prices."""

from __future__ import annotations

import ssl
import time
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from bedrock_simulator.server import simulated_bedrock
from bedrock_simulator.signatures import Keys
from price_keeper.clock import SystemClock
from price_keeper.config import Config
from price_keeper.config.config_sections import EndpointConfig
from price_keeper.doctor import network_probe
from price_keeper.doctor.doctor_checks import FindingStatus
from price_keeper.doctor.permissions import get_table_permissions
from price_keeper.server.tls import ensure_local_certificates
from price_keeper.stores.schema import TABLES

from tests.support.doctor import run_check, run_checks, run_constant_server, write_config
from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import DropAnswer, dynamodb_error, fault_proxy
from tests.support.ports import free_port
from tests.support.price_list_server import DENIED, price_list_server

OURS = Keys("test", "test")  # as the tests' environment has them
SECRET = "sesame-open-sesame"


def on_dynamodb(folder: Path, endpoint: str, prefix: str = PREFIX) -> Config:
    return write_config(folder, store={"engine": "dynamodb", "endpoint": endpoint, "table_prefix": prefix})


def calling(folder: Path, endpoint: str | None, **more: Any) -> Config:
    return write_config(folder, upstream={"endpoint": endpoint, **more})


def nobody_at() -> str:
    return f"http://127.0.0.1:{free_port()}"


class Late(SystemClock):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def now(self) -> float:
        return super().now() + self._seconds


# DynamoDB.


@pytest.mark.parametrize("engine", ["moto", "ministack"])
async def test_doctor_accepts_dynamodb_setup(engines: Engines, tmp_path: Path, engine: str) -> None:
    async with engines.open(engine, tmp_path) as store:
        before = await _items(store.client)
        found = await run_checks(on_dynamodb(tmp_path, engines.endpoints[engine]))
        assert [name for name, each in found.items() if each.status is FindingStatus.TROUBLE] == ["token keys"]
        for name in ("DynamoDB", "tables", "permissions", "clock by the store", "AWS credentials"):
            assert found[name].status is FindingStatus.OK, found[name]
        assert "ConditionCheckItem" in found["permissions"].message
        assert await _items(store.client) == before


async def _items(client: Any) -> dict[str, int]:
    tables = [PREFIX + name for name in TABLES]
    return {name: (await client.scan(TableName=name, Select="COUNT"))["Count"] for name in tables}


async def test_missing_tables_are_reported(engines: Engines, tmp_path: Path) -> None:
    found = await run_checks(on_dynamodb(tmp_path, engines.endpoints["ministack"], f"t{uuid4().hex[:8]}-"))
    assert found["tables"].status is FindingStatus.TROUBLE
    assert "none of the 11 tables" in found["tables"].message
    assert "price-keeper tables create --config config.yaml" in found["tables"].remedy
    assert found["permissions"].status is FindingStatus.SKIPPED


@pytest.mark.parametrize(
    ("verb", "action"),
    [
        ("GetItem", "GetItem"),
        ("Query", "Query"),
        ("BatchGetItem", "BatchGetItem"),
        ("PutItem", "PutItem"),
        ("UpdateItem", "UpdateItem"),
        ("DeleteItem", "DeleteItem"),
        ("TransactWriteItems", "ConditionCheckItem"),
    ],
)
async def test_missing_permission_is_reported(engines: Engines, tmp_path: Path, verb: str, action: str) -> None:
    async with engines.open("ministack", tmp_path), fault_proxy(engines.endpoints["ministack"]) as proxy:
        proxy.always[f"DynamoDB_20120810.{verb}\r\n".encode()] = dynamodb_error("AccessDeniedException")
        found = await run_check("permissions", on_dynamodb(tmp_path, proxy.url))
    tables = [table for table, actions in get_table_permissions("both").items() if action in actions]
    assert found.message == f"not allowed: {action} on {', '.join(tables)}"
    arns = ", ".join(f"arn:aws:dynamodb:us-east-1:*:table/{PREFIX}{table}" for table in tables)
    assert found.remedy == f"allow dynamodb:{action} on {arns}"


async def test_tables_that_cannot_be_described_are_no_trouble(engines: Engines, tmp_path: Path) -> None:
    async with engines.open("ministack", tmp_path), fault_proxy(engines.endpoints["ministack"]) as proxy:
        proxy.always[b"DynamoDB_20120810.Describe"] = dynamodb_error("AccessDeniedException")
        found = await run_checks(on_dynamodb(tmp_path, proxy.url))
    assert (found["tables"].status, "DescribeTable" in found["tables"].remedy) == (FindingStatus.WARNING, True)
    assert found["permissions"].status is FindingStatus.OK


async def test_credentials_refused_by_dynamodb_are_reported(engines: Engines, tmp_path: Path) -> None:
    async with fault_proxy(engines.endpoints["ministack"]) as proxy:
        proxy.always[b"POST"] = dynamodb_error("UnrecognizedClientException")
        found = await run_checks(on_dynamodb(tmp_path, proxy.url))
    for name in ("tables", "permissions"):
        assert "UnrecognizedClientException" in found[name].message
        assert "AWS_ACCESS_KEY_ID" in found[name].remedy


async def test_unreachable_dynamodb_is_reported(engines: Engines, tmp_path: Path) -> None:
    found = await run_checks(on_dynamodb(tmp_path, nobody_at()))
    for name in ("DynamoDB", "tables", "permissions"):
        assert (found[name].status, "store.endpoint" in found[name].remedy) == (FindingStatus.TROUBLE, True), found[
            name
        ]
    assert found["clock by the store"].status is FindingStatus.SKIPPED
    async with fault_proxy(engines.endpoints["ministack"]) as proxy:
        proxy.always[b"HTTP/1.1"] = DropAnswer()
        found = await run_checks(on_dynamodb(tmp_path, proxy.url))
    assert (found["DynamoDB"].status, found["permissions"].status) == (FindingStatus.TROUBLE, FindingStatus.TROUBLE)


# The clock.


@pytest.mark.parametrize(
    ("off", "status", "words"),
    [
        (0, FindingStatus.OK, "agrees with"),
        (-60, FindingStatus.WARNING, "60 s ahead of"),
        (60, FindingStatus.WARNING, "60 s behind"),
        (-900, FindingStatus.TROUBLE, "AWS refuses signatures"),
        (900, FindingStatus.TROUBLE, "900 s behind"),
    ],
)
async def test_wrong_clock_is_reported(tmp_path: Path, off: int, status: FindingStatus, words: str) -> None:
    date = formatdate(round(time.time()) + off, usegmt=True)
    async with run_constant_server({"Date": date}) as port:
        url = f"http://127.0.0.1:{port}"
        bedrock = await run_check("clock by Bedrock", calling(tmp_path, url))
        store = await run_check("clock by the store", on_dynamodb(tmp_path, url))
    for found in (bedrock, store):
        assert (found.status, "timedatectl" in found.remedy) == (status, status is not FindingStatus.OK), found
    if abs(off) != 60:  # a second may have passed
        assert words.partition(" s ")[2] in bedrock.message


async def test_missing_date_skips_clock_check(tmp_path: Path) -> None:
    for headers in ({}, {"Date": "yesterday"}):
        async with run_constant_server(headers) as port:
            found = await run_check("clock by Bedrock", calling(tmp_path, f"http://127.0.0.1:{port}"))
        assert found.status is FindingStatus.SKIPPED, found


# Credentials.


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment in which no provider has any."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    return monkeypatch


async def test_missing_credentials_are_reported(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    async with simulated_bedrock() as bedrock:
        found = await run_checks(calling(tmp_path, bedrock.url))
    for name in ("AWS credentials", "Bedrock in us-east-1"):
        assert "AWS_PROFILE" in found[name].remedy
    assert found["AWS credentials"].status is FindingStatus.TROUBLE
    assert found["Bedrock in us-east-1"].status is FindingStatus.WARNING


async def test_credential_provider_and_expiry_are_reported(tmp_path: Path, bare: pytest.MonkeyPatch) -> None:
    config = calling(tmp_path, nobody_at())
    (tmp_path / "aws").write_text(f"[default]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n")
    bare.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    found = await run_check("AWS credentials", config)
    assert found.message == "by the provider shared-credentials-file; they do not expire"
    bare.setenv("AWS_ACCESS_KEY_ID", "A")
    bare.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    bare.setenv("AWS_SESSION_TOKEN", SECRET)
    assert "for this session only" in (await run_check("AWS credentials", config)).message
    soon = datetime.fromtimestamp(time.time() + 7200, UTC)
    bare.setenv("AWS_CREDENTIAL_EXPIRATION", soon.isoformat())
    found = await run_check("AWS credentials", config)
    assert found.message == f"by the provider env; they expire at {soon:%Y-%m-%d %H:%M:%S} UTC"
    assert (await run_check("AWS credentials", config, clock=Late(9000))).status is FindingStatus.TROUBLE
    bare.setenv("AWS_PROFILE", "nobodys")
    bare.delenv("AWS_ACCESS_KEY_ID")
    found = await run_check("AWS credentials", config)
    assert (found.status, SECRET in found.message) == (FindingStatus.TROUBLE, False)


async def test_bedrock_api_key_is_recognised(tmp_path: Path) -> None:
    async with simulated_bedrock() as bedrock:
        config = calling(tmp_path, bedrock.url, auth="bearer")
        good = {"AWS_BEARER_TOKEN_BEDROCK": "simulated-api-key"}
        found = await run_checks(config, good)
        assert (found["Bedrock API key"].status, found["AWS credentials"].status) == (
            FindingStatus.OK,
            FindingStatus.OK,
        )
        assert found["Bedrock in us-east-1"].message.endswith("takes our API key")
        found = await run_checks(config)
    for name in ("Bedrock API key", "Bedrock in us-east-1"):
        assert "AWS_BEARER_TOKEN_BEDROCK" in found[name].remedy
    assert found["Bedrock API key"].status is FindingStatus.TROUBLE


# Bedrock.


async def test_bedrock_check_uses_free_operation(tmp_path: Path) -> None:
    async with simulated_bedrock(keys=OURS) as bedrock:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, bedrock.url))
        assert found.status is FindingStatus.OK, found
        assert [entry.operation for entry in bedrock.ledger] == ["GetAsyncInvoke"]


async def test_every_endpoint_of_label_is_checked(tmp_path: Path) -> None:
    async with simulated_bedrock(keys=OURS) as bedrock:
        config = calling(tmp_path, bedrock.url)
        label = config.labels["economy"]
        places = (
            EndpointConfig("us-west-2"),
            EndpointConfig("eu-west-1", endpoint=nobody_at()),
            EndpointConfig("us-west-2"),
        )
        object.__setattr__(label, "endpoints", places)
        found = await run_checks(config, only="Bedrock in")
    assert {name: each.status for name, each in found.items()} == {
        "Bedrock in us-east-1": FindingStatus.OK,
        "Bedrock in us-west-2": FindingStatus.OK,
        "Bedrock in eu-west-1": FindingStatus.TROUBLE,
    }
    assert "labels.economy.endpoints" in found["Bedrock in eu-west-1"].remedy


async def test_refusal_of_bedrock_is_reported(tmp_path: Path) -> None:
    async with simulated_bedrock() as bedrock:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, bedrock.url))
    assert (found.status, "UnrecognizedClientException" in found.message) == (FindingStatus.TROUBLE, True)
    assert "aws sts get-caller-identity" in found.remedy
    async with simulated_bedrock(keys=OURS) as bedrock:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, bedrock.url), clock=Late(3600))
    assert (found.status, "clock" in found.remedy) == (FindingStatus.TROUBLE, True), found
    denied = {"x-amzn-errortype": "AccessDeniedException:http://internal/", "x-amzn-requestid": "1"}
    async with run_constant_server(denied, status=403) as port:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, f"http://127.0.0.1:{port}"))
    assert (found.status, "bedrock:InvokeModel" in found.remedy) == (FindingStatus.WARNING, True)
    async with run_constant_server({}, status=200) as port:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, f"http://127.0.0.1:{port}"))
    assert (found.status, "not as Bedrock does" in found.message) == (FindingStatus.WARNING, True)


async def test_unreachable_bedrock_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await run_check("Bedrock in us-east-1", calling(tmp_path, nobody_at()))
    assert (found.status, "refused" in found.message, "upstream.endpoint" in found.remedy) == (
        FindingStatus.TROUBLE,
        True,
        True,
    )
    found = await run_check("Bedrock in us-east-1", calling(tmp_path, "https://nobody.invalid"))
    assert (found.status, "getent hosts nobody.invalid" in found.remedy) == (FindingStatus.TROUBLE, True)
    monkeypatch.setattr(network_probe, "PROBE_TIMEOUT_SECONDS", 0.3)
    async with run_constant_server({}, status=0) as port:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, f"http://127.0.0.1:{port}"))
    assert (found.status, "no answer in 0.3 seconds" in found.message) == (FindingStatus.TROUBLE, True)


async def test_bedrock_with_unknown_certificate_is_reported(tmp_path: Path) -> None:
    _, certificate, key = ensure_local_certificates(tmp_path / "tls", time.time())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with run_constant_server({}, tls=context) as port:
        found = await run_check("Bedrock in us-east-1", calling(tmp_path, f"https://localhost:{port}"))
    assert (found.status, "SSL_CERT_FILE" in found.remedy) == (FindingStatus.TROUBLE, True), found


# Prices.


async def test_price_list_problems_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = calling(tmp_path, nobody_at())
    async with price_list_server() as prices:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", prices.url)
        assert (await run_check("price list", config)).status is FindingStatus.OK
        assert [call["MaxResults"] for call in prices.calls] == [1]
        prices.always = DENIED
        found = await run_check("price list", config)
    assert (found.status, "pricing:GetProducts" in found.remedy) == (FindingStatus.WARNING, True)
    assert "the configuration's prices stay in force" in found.message
