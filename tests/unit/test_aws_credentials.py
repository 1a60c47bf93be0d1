"""AWS credentials: renewed in the background, kept when they cannot be, and never made up."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from price_keeper.errors import ConfigError, UpstreamUnavailable
from price_keeper.provider_chain import ProviderChain
from price_keeper.upstream.aws_credentials import RefreshingCredentials, StaticCredentials
from price_keeper.upstream.connection_pool import ConnectionPool, UpstreamEndpoint
from price_keeper.upstream.forwarder import MAX_SIGNERS, BearerAuthorizer, SigV4Authorizer, UpstreamCall, UpstreamTarget
from price_keeper.upstream.sigv4 import AwsCredentials
from price_keeper.upstream.upstream_health import UpstreamHealth

from tests.support.clock import ManualClock
from tests.support.raw_clients import eventually


def _frozen(number: int) -> SimpleNamespace:
    return SimpleNamespace(access_key=f"KEY{number}", secret_key="secret", token=None)


class Chain:
    """What botocore's chain would find, call after call."""

    def __init__(self, *findings: Any) -> None:
        self._findings = iter(findings)

    def __call__(self) -> Any:
        finding = next(self._findings)
        if isinstance(finding, Exception):
            raise finding
        return finding


async def test_missing_credentials_are_refused_clearly() -> None:
    provided = RefreshingCredentials(lambda: Chain(None))
    with pytest.raises(UpstreamUnavailable, match="no AWS credentials"):
        provided.current()
    await provided.renew()
    with pytest.raises(UpstreamUnavailable, match="no AWS credentials"):
        provided.current()


async def test_renewed_credentials_replace_old_ones() -> None:
    provided = RefreshingCredentials(lambda: Chain(_frozen(1), _frozen(2)))
    await provided.renew()
    assert provided.current() == AwsCredentials("KEY1", "secret")
    await provided.renew()
    assert provided.current() == AwsCredentials("KEY2", "secret")


async def test_unchanged_credentials_keep_identity() -> None:
    """The signer keeps its key for as long as it is given the same object."""
    provided = RefreshingCredentials(lambda: Chain(_frozen(1), _frozen(1)))
    await provided.renew()
    first = provided.current()
    await provided.renew()
    assert provided.current() is first


async def test_failed_renewal_keeps_credentials_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    provided = RefreshingCredentials(lambda: Chain(_frozen(1), OSError("secret-in-the-message"), None))
    await provided.renew()
    with caplog.at_level(logging.WARNING, "price_keeper.forwarding"):
        await provided.renew()
        await provided.renew()
    assert provided.current().access_key == "KEY1"
    assert [record.getMessage() for record in caplog.records] == [
        "AWS credentials could not be renewed: OSError",
        "no AWS credentials were found",
    ]


async def test_expired_credentials_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    expired = RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired.")
    provided = RefreshingCredentials(lambda: Chain(_frozen(1), expired, expired, _frozen(2), expired))
    with caplog.at_level(logging.WARNING, "price_keeper.forwarding"):
        for _ in range(5):
            await provided.renew()
    expired_text = "AWS credentials could not be renewed: what came is expired"
    assert [record.getMessage() for record in caplog.records] == [
        expired_text,
        "AWS credentials are renewed again",
        expired_text,
    ]


async def test_hanging_provider_blocks_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the other renewal, nor calls, which are signed with what is there."""
    speaks, first = threading.Event(), iter([_frozen(1)])
    monkeypatch.setattr(ProviderChain.load, "__defaults__", (0.02,))

    def find() -> Any:
        if (known := next(first, None)) is not None:
            return known
        assert speaks.wait(30)
        return _frozen(2)

    provided = RefreshingCredentials(lambda: find)
    reach = UpstreamHealth(ManualClock(), SigV4Authorizer(provided, lambda: 0.0).check, ConnectionPool)  # type: ignore[arg-type]
    await provided.renew()
    assert await reach.check() is None
    with caplog.at_level(logging.WARNING, "price_keeper.forwarding"):
        await asyncio.gather(provided.renew(), provided.renew_unusable(), provided.renew())
    assert provided.current().access_key == "KEY1"
    assert "could not be renewed, and the last ones hold" in str(await reach.check())
    assert [record.getMessage() for record in caplog.records] == [
        "AWS credentials could not be renewed: no answer in 0.02 seconds"
    ]
    speaks.set()
    await eventually(lambda: provided._chain._pending is not None and provided._chain._pending.done())
    await provided.renew()
    assert (provided.current().access_key, await reach.check()) == ("KEY2", None)


async def test_refused_credentials_rebuild_provider_chain() -> None:
    chains = [Chain(_frozen(1), _frozen(1)), Chain(_frozen(2))]
    provided, renewed = RefreshingCredentials(lambda: chains.pop(0)), []
    provided.subscribe(lambda: renewed.append(provided.current().access_key))
    await provided.renew()
    await provided.renew_unusable()
    assert renewed == ["KEY1"]
    provided.on_refused()
    await provided.renew_unusable()
    await provided.renew_unusable()
    assert renewed == ["KEY1", "KEY2"]


async def test_repeated_refusals_back_off_renewal() -> None:
    """What is found may be new each time, and no better: a role's, in a region that the account has not enabled."""
    turns, reads = 0, list[int]()

    def chain() -> Any:
        reads.append(turns)
        return lambda: _frozen(turns)

    async def passed(end: int, *, are_refused: bool) -> None:
        nonlocal turns
        while turns < end:
            turns += 1
            if are_refused:
                provided.on_refused()
            await provided.renew_unusable()

    provided = RefreshingCredentials(chain)
    await passed(100, are_refused=True)
    assert reads == [1, 3, 7, 15, 31, 47, 63, 79, 95]
    await passed(150, are_refused=False)
    await passed(151, are_refused=True)
    assert reads[-1] == 151


async def test_botocore_provider_chain_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = FROMFILE\naws_secret_access_key = secret\naws_session_token = t\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    provided = RefreshingCredentials()
    await provided.renew()
    assert provided.current() == AwsCredentials("FROMFILE", "secret", "t")


def _given(access: Any, secret: Any, token: Any) -> SimpleNamespace:
    return SimpleNamespace(access_key=access, secret_key=secret, token=token)


async def test_trailing_newline_is_not_part_of_credentials() -> None:
    chain = Chain(_given("KEY\n", " secret\r\n", "token\n"), _given("KEY", "secret", ""))
    provided = RefreshingCredentials(lambda: chain)
    await provided.renew()
    assert provided.current() == AwsCredentials("KEY", "secret", "token")
    await provided.renew()
    assert provided.current() == AwsCredentials("KEY", "secret", None)


UNUSABLE = [
    ("KEY", "se cret", None),
    ("KEY", "", None),
    (None, None, None),
    ("KEY", "s\u00e9cret", None),
    ("KEY", "secret", "to\nken"),
]


@pytest.mark.parametrize("values", UNUSABLE)
async def test_unusable_credentials_at_start_are_reported_and_redacted(values: Any) -> None:
    with pytest.raises(ConfigError, match="the AWS credentials cannot be used: ") as refused:
        await RefreshingCredentials(lambda: Chain(_given(*values))).renew()
    assert all(value not in str(refused.value) for value in values[1:] if value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("values", UNUSABLE)
async def test_unusable_credentials_later_keep_old_ones(values: Any, caplog: pytest.LogCaptureFixture) -> None:
    provided = RefreshingCredentials(lambda: Chain(_frozen(1), _given(*values), _frozen(2)))
    await provided.renew()
    with caplog.at_level(logging.WARNING, "price_keeper.forwarding"):
        await provided.renew()
    assert provided.current().access_key == "KEY1"
    assert len(caplog.records) == 1
    assert all(value not in caplog.text for value in values[1:] if value)
    await provided.renew()
    assert provided.current().access_key == "KEY2"


def test_bearer_key_must_be_one_word() -> None:
    target = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
    call = UpstreamCall("POST", "", [], lambda _: b"", [target])
    assert BearerAuthorizer(" a-key\n").build_header_lines(call, target, "", b"") == b"authorization: Bearer a-key\r\n"
    for key in ("", " \n", "a key", "a\r\nx-evil: 1", "k\u00e9y"):
        with pytest.raises(ConfigError) as refused:
            BearerAuthorizer(key)
        assert "printable ASCII without spaces" in str(refused.value)
        assert "evil" not in str(refused.value)


def test_signers_of_many_regions_are_bounded() -> None:
    signing = SigV4Authorizer(StaticCredentials(AwsCredentials("KEY", "secret")), lambda: 0.0)

    def sign(region: str) -> bytes:
        target = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), region, "m", "/")
        return signing.build_header_lines(UpstreamCall("POST", "", [], lambda _: b"", [target]), target, "h", b"")

    first = sign("us-east-1")
    for number in range(1000):
        sign(f"eu-west-{number}")
    assert len(signing._signers) == MAX_SIGNERS
    assert sign("us-east-1") == first


def test_headers_changed_by_load_balancers_are_not_signed() -> None:
    """Else an app that is traced would be refused, and as if the sidecar's credentials were no good."""
    sent = [("content-type", "a/b"), ("x-amzn-bedrock-trace", "ON"), ("x-amzn-trace-id", "Root=1"), ("accept", "*")]
    target = UpstreamTarget(UpstreamEndpoint("127.0.0.1", 1, False), "us-east-1", "m", "/")
    signing = SigV4Authorizer(StaticCredentials(AwsCredentials("KEY", "secret")), lambda: 0.0)
    signed = signing.build_header_lines(UpstreamCall("POST", "", sent, lambda _: b"", [target]), target, "h", b"")
    assert b"SignedHeaders=content-type;host;x-amz-date;x-amzn-bedrock-trace," in signed
