"""`price-keeper doctor --role`: what each role needs is looked at, and nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from price_keeper.app import Role
from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import build_jwks
from price_keeper.config import Config
from price_keeper.config.config_sections import IdentityConfig, KeyConfig
from price_keeper.config.value_checks import Address
from price_keeper.doctor.doctor_checks import FindingStatus
from price_keeper.doctor.permissions import ACTIONS, get_table_permissions

from tests.support.commands import ROOT, call_in_process, sidecar
from tests.support.doctor import run_check, run_checks, run_constant_server, write_config
from tests.support.engines import PREFIX, Engines
from tests.support.fault_proxy import dynamodb_error, fault_proxy
from tests.support.ports import free_port

SECRET = "sesame-open-sesame-open-sesame-open"
ADMIN_KEY = "the-admin-key-of-these-tests-long-enough"
_LABELS = ROOT.joinpath("config.yaml").read_text().partition("\nlabels:\n")[2]
OF_CALLS = {
    "Bedrock API key",
    "clock by Bedrock",
    "open files",
    "org of the identity",
    "certificate",
    "price list",
    "data port",
    "Bedrock",
}
ROLES: tuple[Role, ...] = ("both", "sidecar", "control")


def made(folder: Path, kid: str, out: str = "keys") -> Path:
    done = call_in_process("keys", "new", "--kid", kid, "--out", out, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / out


def public(folder: Path, *kids: str) -> tuple[KeyConfig, ...]:
    return tuple(KeyConfig(kid, "EdDSA", public_key_file=str(folder / f"{kid}.pub.pem")) for kid in kids)


def private(folder: Path, kid: str) -> KeyConfig:
    return KeyConfig(kid, "EdDSA", private_key_file=str(folder / f"{kid}.pem"))


@asynccontextmanager
async def control(keys: Any, status: int = 200, health: Any = None) -> AsyncIterator[str]:
    """What stands in for a control service: its URL. It answers nothing but what the doctor may ask."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        assert request.headers.keys() <= {"Host", "Connection"}
        if request.path == "/health":
            return web.json_response({"status": "ok"} if health is None else health)
        assert request.path == "/.well-known/jwks.json"
        return web.json_response(keys, status=status)

    async with RawTestServer(answer) as server:
        yield f"http://127.0.0.1:{server.port}"


def halves(*keys: KeyConfig, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    return build_jwks(load_keys(keys, environ or {}))


# What is looked at.


async def test_each_role_has_its_own_checks(tmp_path: Path) -> None:
    names = {role: set(await run_checks(write_config(tmp_path), role=role)) for role in ROLES}
    assert names["both"] - names["control"] == OF_CALLS
    assert names["control"] - names["both"] == set()
    assert names["both"] - names["sidecar"] == {"admin key"}
    assert names["sidecar"] - names["both"] == {"control service"}
    for found in names.values():
        assert {"token keys", "journal", "control port", "store file", "webhook", "permissions"} <= found


async def test_control_service_needs_no_aws_credentials(tmp_path: Path) -> None:
    config = write_config(tmp_path, upstream={"endpoint": None})
    assert (await run_check("AWS credentials", config, role="control")).status is FindingStatus.SKIPPED
    assert (await run_check("AWS credentials", config, role="sidecar")).status is not FindingStatus.SKIPPED


async def test_data_port_of_control_service_may_be_in_use(tmp_path: Path) -> None:
    async with run_constant_server({}, status=200) as port:
        config = write_config(tmp_path, listen={"data": Address("127.0.0.1", port)})
        assert (await run_checks(config, role="sidecar"))["data port"].status is FindingStatus.TROUBLE
        assert "data port" not in await run_checks(config, role="control")


# Keys.


async def test_each_role_needs_its_keys(tmp_path: Path) -> None:
    keys = made(tmp_path, "k1")
    halves_alone = write_config(tmp_path, auth={"keys": public(keys, "k1")})
    pair = write_config(tmp_path, auth={"keys": (private(keys, "k1"),)})
    assert (await run_check("token keys", halves_alone, role="sidecar")).message == "k1 (EdDSA, verifies)"
    found = await run_check("token keys", halves_alone, role="control")
    assert (found.status, "auth.keys.0" in found.remedy) == (FindingStatus.TROUBLE, True)
    assert (await run_check("token keys", pair, role="control")).message == "k1 (EdDSA, signs)"
    found = await run_check("token keys", pair, role="sidecar")
    assert (found.status, "public_key_file" in found.remedy, "k1 here" in found.message) == (
        FindingStatus.WARNING,
        True,
        True,
    )
    shared = write_config(tmp_path, auth={"keys": (KeyConfig("k1", "HS256", secret_env="S"),)})
    found = await run_check("token keys", shared, {"S": SECRET}, role="sidecar")
    assert (found.status, "EdDSA" in found.remedy, SECRET in found.message) == (FindingStatus.WARNING, True, False)
    for role in ROLES:
        assert (await run_check("token keys", shared, role=role)).status is FindingStatus.TROUBLE


# The control service.


def verifying(folder: Path, url: str | None, *keys: KeyConfig, **more: Any) -> Config:
    return write_config(folder, auth={"keys": keys, "control_url": url, **more})


async def looked(config: Config, environ: Mapping[str, str] | None = None) -> tuple[FindingStatus, str, str]:
    found = await run_check("control service", config, environ, role="sidecar")
    return found.status, found.message, found.remedy


async def test_control_service_with_matching_keys_is_accepted(tmp_path: Path) -> None:
    keys = made(tmp_path, "k1")
    own = public(keys, "k1")
    async with control(halves(*own)) as url:
        status, message, _ = await looked(verifying(tmp_path, url, *own))
    assert (status, message.endswith("its tokens verify here: k1")) == (FindingStatus.OK, True)


async def test_keys_that_differ_on_both_sides_are_reported(tmp_path: Path) -> None:
    keys, other = made(tmp_path, "k1"), made(tmp_path, "k1", "others")
    made(tmp_path, "k2")
    first, second, anothers = *public(keys, "k1", "k2"), *public(other, "k1")
    async with control(halves(first)) as url:
        status, message, mend = await looked(verifying(tmp_path, url, second))
        assert (status, "signs with k1, which does not verify here" in message) == (FindingStatus.TROUBLE, True)
        assert "auth.keys" in mend
        status, message, mend = await looked(verifying(tmp_path, url, anothers))
        assert (status, "another key by the name of k1" in message) == (FindingStatus.TROUBLE, True)
        status, message, mend = await looked(verifying(tmp_path, url, first, second))
        assert (status, "no key by the name of k2" in message) == (FindingStatus.WARNING, True)
    async with control(halves(first, second)) as url:
        status, message, mend = await looked(verifying(tmp_path, url, first))
        assert (status, "also has k2" in message) == (FindingStatus.WARNING, True)
        status, message, mend = await looked(verifying(tmp_path, url, second))
        assert (status, "signs with k1" in message) == (FindingStatus.TROUBLE, True)


async def test_shared_secrets_cannot_be_compared(tmp_path: Path) -> None:
    keys = made(tmp_path, "k1")
    shared, pair = KeyConfig("k1", "HS256", secret_env="S"), public(keys, "k1")
    async with control({"keys": []}) as url:
        status, message, _ = await looked(verifying(tmp_path, url, shared), {"S": SECRET})
        assert (status, "not compared" in message) == (FindingStatus.OK, True)
        assert (await looked(verifying(tmp_path, url, *pair)))[0] is FindingStatus.TROUBLE
    async with control(halves(*pair)) as url:
        assert (await looked(verifying(tmp_path, url, shared), {"S": SECRET}))[0] is FindingStatus.TROUBLE
        assert (await looked(verifying(tmp_path, url, shared)))[
            0
        ] is FindingStatus.SKIPPED  # told by the keys' own check


@pytest.mark.parametrize(
    ("keys", "status", "health", "expected"),
    [
        ({"keys": []}, 404, None, "has no control API"),  # a sidecar's own control port, for instance
        ("no keys", 200, None, "has no control API"),
        ({"keys": [1]}, 200, None, "has no control API"),
        ({"keys": []}, 200, {"status": "fine"}, "is no control service"),
        ({"keys": []}, 200, [], "is no control service"),
    ],
)
async def test_other_server_in_place_of_control_service_is_reported(
    tmp_path: Path, keys: Any, status: int, health: Any, expected: str
) -> None:
    own = public(made(tmp_path, "k1"), "k1")
    async with control(keys, status, health) as url:
        found = await looked(verifying(tmp_path, url, *own))
    assert (found[0], expected in found[1], "auth.control_url" in found[2]) == (FindingStatus.TROUBLE, True, True), (
        found
    )


async def test_starting_or_unreachable_control_service_is_reported(tmp_path: Path) -> None:
    own = public(made(tmp_path, "k1"), "k1")
    async with control({}, 503) as url:
        assert (await looked(verifying(tmp_path, url, *own)))[0] is FindingStatus.WARNING
    for url, words in ((f"http://127.0.0.1:{free_port()}", "refused"), ("https://nobody.invalid", "not resolve")):
        status, message, mend = await looked(verifying(tmp_path, url, *own))
        assert (status, words in message, "auth.control_url" in mend) == (FindingStatus.TROUBLE, True, True), message
    status, message, mend = await looked(verifying(tmp_path, None, *own))
    assert (status, "403" in message, "auth.control_url" in mend) == (FindingStatus.WARNING, True, True)
    bound = {"mode": "identity", "identity": IdentityConfig("6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b", "shop")}
    assert (await looked(verifying(tmp_path, None, *own, **bound)))[0] is FindingStatus.SKIPPED


# Tables.


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_tries_its_table_operations(engines: Engines, tmp_path: Path, role: Role) -> None:
    config = {"engine": "dynamodb", "table_prefix": PREFIX}
    denied = {}
    async with engines.open("ministack", tmp_path), fault_proxy(engines.endpoints["ministack"]) as proxy:
        store = {**config, "endpoint": proxy.url}
        found = await run_check("permissions", write_config(tmp_path, store=store), role=role)
        assert found.status is FindingStatus.OK, found
        for action in ACTIONS:
            verb = "TransactWriteItems" if action == "ConditionCheckItem" else action
            proxy.always = {f"DynamoDB_20120810.{verb}\r\n".encode(): dynamodb_error("AccessDeniedException")}
            found = await run_check("permissions", write_config(tmp_path, store=store), role=role)
            if found.status is FindingStatus.TROUBLE:
                denied[action] = found.message.removeprefix(f"not allowed: {action} on ").split(", ")
                assert f"table/{PREFIX}{denied[action][0]}" in found.remedy
    tried = {(table, action) for action, tables in denied.items() for table in tables}
    assert tried == {(table, action) for table, actions in get_table_permissions(role).items() for action in actions}


# The command.


def test_doctor_command_checks_running_control_service(tmp_path: Path) -> None:
    keys = made(tmp_path, "k1")
    free = {"PRICE_KEEPER__LISTEN__DATA": "127.0.0.1:0", "PRICE_KEEPER__LISTEN__CONTROL": "127.0.0.1:0"}
    quiet = free | {"AWS_EC2_METADATA_DISABLED": "true", "PRICE_KEEPER__UPSTREAM__ENDPOINT": "simulated"}

    def placed(name: str, source: str, more: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        auth = f"auth:\n  keys: [{{kid: k1, alg: EdDSA, {source}}}]\n{more}"
        (folder / "config.yaml").write_text(f"{auth}\nlabels:\n{_LABELS}")
        return folder

    own = placed("control", f"private_key_file: {keys / 'k1.pem'}")
    result = call_in_process("doctor", "--role", "control", folder=own, PRICE_KEEPER_API_KEY=ADMIN_KEY, **quiet)
    assert (result.returncode, "data port" in result.stdout) == (0, False), result.stdout
    with sidecar("serve", "--role", "control", folder=own, PRICE_KEEPER_API_KEY=ADMIN_KEY, **quiet) as running:
        url = f"  control_url: {running.control}\n"
        folder = placed("sidecar", f"public_key_file: {keys / 'k1.pub.pem'}", url)
        result = call_in_process("doctor", "--role", "sidecar", "--json", folder=folder, **quiet)
        found = {each["name"]: each for each in json.loads(result.stdout)["checks"]}
        assert (result.returncode, found["control service"]["status"]) == (0, "ok"), result.stdout
        with sidecar("serve", "--role", "sidecar", folder=folder, **quiet) as other:
            mistaken = placed(
                "mistaken", f"public_key_file: {keys / 'k1.pub.pem'}", f"  control_url: {other.control}\n"
            )
            result = call_in_process("doctor", "--role", "sidecar", folder=mistaken, **quiet)
            assert (result.returncode, "has no control API" in result.stdout) == (1, True), result.stdout
    refused = call_in_process("doctor", "--role", "sidecar", "--data-dir", ".", folder=tmp_path)
    assert (refused.returncode, "--role" in refused.stderr) == (2, True)
    assert call_in_process("doctor", "--role", "none", folder=tmp_path).returncode == 2
