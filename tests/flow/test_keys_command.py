"""`price-keeper keys new`: what it makes is what `auth.keys` takes, and nothing is ever overwritten."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml
from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.config import load_config
from price_keeper.errors import AccessDenied

from tests.support.commands import call_in_process

ORG = "550e8400-e29b-41d4-a716-446655440000"
REST = """
labels:
  premium: {model: a.b, format: nova, prices_usd_per_1m: {input: 3, output: 15}}
"""
FILES = {"EdDSA": ["k2.pem", "k2.pub.pem"], "RS256": ["k2.pem", "k2.pub.pem"], "HS256": ["k2.secret"]}


def new(folder: Path, *arguments: str, code: int = 0) -> CompletedProcess[str]:
    result = call_in_process("keys", "new", *arguments, folder=folder)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False), result.stderr
    return result


def pasted(output: str) -> list[str]:
    """The pieces of configuration, as a reader would cut them out."""
    lines, blocks = output.splitlines(), []
    for number, line in enumerate(lines):
        if line == "auth:":
            end = next(at for at in range(number, len(lines)) if not lines[at])
            blocks.append("\n".join(lines[number:end]))
    return blocks


def loaded(folder: Path, *blocks: str) -> TokenService:
    keys = [key for block in blocks for key in yaml.safe_load(block)["auth"]["keys"]]
    (folder / "config.yaml").write_text(yaml.safe_dump({"auth": {"keys": keys}}) + REST)
    config = load_config(folder / "config.yaml", {})
    return TokenService(load_keys(config.auth.keys, {}), "price-keeper", lambda: 1_800_000_000.0)


@pytest.mark.parametrize("alg", list(FILES))
def test_printed_key_configuration_works_when_pasted(tmp_path: Path, alg: str) -> None:
    output = new(tmp_path, "--alg", alg, "--kid", "k2", "--out", "keys").stdout
    assert sorted(os.listdir(tmp_path / "keys")) == FILES[alg]
    blocks = pasted(output)
    (tmp_path / "config.yaml").write_text(blocks[0] + REST)
    assert "good" in call_in_process("check-config", folder=tmp_path).stdout
    token = loaded(tmp_path, blocks[0]).mint_access(ORG, "web").token
    for block in blocks:
        assert loaded(tmp_path, block).verify_caller(token).app == "web"
    assert len(blocks) == len(FILES[alg])
    if alg != "HS256":
        with pytest.raises(AccessDenied, match="no key to sign"):
            loaded(tmp_path, blocks[1]).mint_access(ORG, "web")


@pytest.mark.parametrize("alg", list(FILES))
def test_private_key_is_private_and_not_printed(tmp_path: Path, alg: str) -> None:
    result = new(tmp_path, "--alg", alg, "--kid", "k2", "--out", "keys")
    private, *public = (tmp_path / "keys" / name for name in FILES[alg])
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700
    for line in private.read_text().splitlines():
        assert line not in result.stdout + result.stderr
    for each in public:
        assert each.read_text().startswith("-----BEGIN PUBLIC KEY-----")


def test_existing_key_is_not_overwritten(tmp_path: Path) -> None:
    new(tmp_path, "--kid", "k2", "--out", "keys")
    before = {each: each.read_bytes() for each in (tmp_path / "keys").iterdir()}
    result = new(tmp_path, "--kid", "k2", "--out", "keys", "--alg", "RS256", code=1)
    assert "k2.pem is there already" in result.stderr
    assert {each: each.read_bytes() for each in (tmp_path / "keys").iterdir()} == before


@pytest.mark.parametrize("there", ["k2.pub.pem", "k2.pem"])
def test_both_key_halves_are_written_or_none(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("somebody's")
    assert f"{there} is there already" in new(tmp_path, "--kid", "k2", "--out", ".", code=1).stderr
    assert os.listdir(tmp_path) == [there]
    assert (tmp_path / there).read_text() == "somebody's"


def test_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "k2.pem").symlink_to(tmp_path / "elsewhere")
    assert "is there already" in new(tmp_path, "--kid", "k2", "--out", ".", code=1).stderr
    assert not (tmp_path / "elsewhere").exists()


def test_folder_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("in the way")
    assert "cannot write" in new(tmp_path, "--kid", "k2", "--out", "keys", code=1).stderr


@pytest.mark.parametrize("kid", ["", "../k2", "a/b", ".hidden", "..", "a b", "a\n", "é", "x" * 101])
def test_key_id_must_be_a_file_name(tmp_path: Path, kid: str) -> None:
    assert "--kid" in new(tmp_path, f"--kid={kid}", "--out", "keys", code=2).stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("arguments", [(), ("--kid", "k2"), ("--out", "."), ("--kid", "k", "--out", ".", "--alg", "x")])
def test_missing_option_is_reported(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert "usage" in new(tmp_path, *arguments, code=2).stderr


@pytest.mark.parametrize("kid", ["007", "1e3", "yes", "null", "k1"])
def test_key_ids_and_folders_are_quoted_for_yaml(tmp_path: Path, kid: str) -> None:
    folder = tmp_path / "my: keys #1"
    blocks = pasted(new(tmp_path, "--kid", kid, "--out", str(folder)).stdout)
    (tmp_path / "config.yaml").write_text(blocks[0] + REST)
    (key,) = load_config(tmp_path / "config.yaml", {}).auth.keys
    assert (key.kid, key.private_key_file) == (kid, str(folder / f"{kid}.pem"))


def test_documented_key_rotation_refuses_no_token(tmp_path: Path) -> None:
    """At no step does a process refuse a token that another mints at that step or minted before it."""
    old, new_one = (pasted(new(tmp_path, "--kid", kid, "--out", "keys").stdout) for kid in ("k1", "k2"))
    steps: list[Any] = [[old], [old, new_one], [new_one, old], [new_one]]
    minters = [loaded(tmp_path, *(pair[0] for pair in step)) for step in steps]
    sidecars = [loaded(tmp_path, *(pair[1] for pair in step)) for step in steps]
    for at in range(3):
        token = minters[at].mint_access(ORG, "web").token
        for during in (at, at + 1):  # processes are restarted one after the other
            assert sidecars[during].verify_caller(token).app == "web"
    first = minters[0].mint_access(ORG, "web").token
    with pytest.raises(AccessDenied):
        sidecars[3].verify_caller(first)
    assert sidecars[2].verify_caller(first).app == "web"


def test_rotation_steps_are_printed_in_order(tmp_path: Path) -> None:
    output = new(tmp_path, "--kid", "k2", "--out", "keys").stdout
    steps = [output.index(words) for words in ("second of auth.keys", "move it to the first", "30 days by default")]
    assert steps == sorted(steps)
