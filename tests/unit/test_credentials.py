"""AWS credentials: renewed in the background, kept when they cannot be, and never made up."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.errors import UpstreamAway
from proxy.forwarding.credentials import ProvidedCredentials
from proxy.forwarding.sigv4 import Credentials


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


async def test_none_yet_is_a_clear_refusal() -> None:
    provided = ProvidedCredentials(Chain(None))
    with pytest.raises(UpstreamAway, match="no AWS credentials"):
        provided.current()
    await provided.renew()
    with pytest.raises(UpstreamAway, match="no AWS credentials"):
        provided.current()


async def test_new_ones_take_the_place_of_old_ones() -> None:
    provided = ProvidedCredentials(Chain(_frozen(1), _frozen(2)))
    await provided.renew()
    assert provided.current() == Credentials("KEY1", "secret")
    await provided.renew()
    assert provided.current() == Credentials("KEY2", "secret")


async def test_the_same_ones_stay_the_same_object() -> None:
    """The signer keeps its key for as long as it is given the same object."""
    provided = ProvidedCredentials(Chain(_frozen(1), _frozen(1)))
    await provided.renew()
    first = provided.current()
    await provided.renew()
    assert provided.current() is first


async def test_what_cannot_be_renewed_is_kept_and_told(caplog: pytest.LogCaptureFixture) -> None:
    provided = ProvidedCredentials(Chain(_frozen(1), RuntimeError("secret-in-the-message"), None))
    await provided.renew()
    with caplog.at_level(logging.WARNING, "proxy.forwarding"):
        await provided.renew()
        await provided.renew()
    assert provided.current().access_key == "KEY1"
    assert [record.getMessage() for record in caplog.records] == [
        "AWS credentials could not be renewed: RuntimeError",
        "no AWS credentials were found",
    ]


async def test_botocores_own_chain_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = FROMFILE\naws_secret_access_key = secret\naws_session_token = t\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    provided = ProvidedCredentials()
    await provided.renew()
    assert provided.current() == Credentials("FROMFILE", "secret", "t")
