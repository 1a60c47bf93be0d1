"""`price-keeper doctor` on this machine: all well on the development set-up, and each trouble made real."""

from __future__ import annotations

import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from price_keeper.clock import SystemClock
from price_keeper.config.config_sections import KeyConfig, TlsConfig, WebhookConfig
from price_keeper.config.value_checks import Address
from price_keeper.doctor import disk_checks
from price_keeper.doctor import doctor_checks as carrying
from price_keeper.doctor.doctor_checks import DoctorCheck, Finding, FindingStatus, in_thread, ok, run_doctor_checks
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.ledger.journal_lock import lock_folder
from price_keeper.ledger.ulid import UlidFactory
from price_keeper.server.tls import ensure_local_certificates
from price_keeper.stores.sqlite_file import prepare_file

from tests.support.clock import ManualClock
from tests.support.commands import ROOT, call_in_process, price_keeper, sidecar
from tests.support.doctor import journal_of, run_check, run_constant_server, store_path, write_config
from tests.support.engines import Engines
from tests.support.ports import free_port
from tests.support.recording_harness import open_recording_harness

SECRET = "sesame-open-sesame-open-sesame-open"


def ports_of(*urls: str) -> tuple[str, ...]:
    data, control = (str(urlsplit(url).port) for url in urls)
    return "--port", data, "--control-port", control


# The command.


def test_doctor_accepts_development_setup(tmp_path: Path) -> None:
    with sidecar("dev", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        before = sorted(str(path) for path in tmp_path.rglob("*") if "-shm" not in path.name)
        where = ("--data-dir", "data", *ports_of(running.data, running.control))
        result = call_in_process("doctor", *where, folder=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), result.stdout
        lines = result.stdout.splitlines()
        assert {line.split()[0] for line in lines[:-2]} == {"ok", "-"}
        assert result.stdout.count("is served by a sidecar that runs") == 2
        assert "belongs to a sidecar that runs; nothing was written there" in result.stdout
        found = json.loads(call_in_process("doctor", *where, "--json", folder=tmp_path).stdout)
        assert found["status"] == "ok"
        assert {check["status"] for check in found["checks"]} == {"ok", "skipped"}
        assert sorted(str(path) for path in tmp_path.rglob("*") if "-shm" not in path.name) == before
        secrets = [(tmp_path / "data" / name).read_text() for name in ("token-key", "admin-key", "demo-secret")]
        assert not any(secret in result.stdout + json.dumps(found) for secret in secrets)
        assert running.stop() == 0
    result = call_in_process("doctor", *where, folder=tmp_path)
    assert (result.returncode, "data/journal can be written to" in result.stdout) == (0, True), result.stdout
    assert "nothing waits to be brought to the store" in result.stdout
    assert sorted(path.name for path in (tmp_path / "data" / "journal").glob("doctor-*")) == []


def test_doctor_reports_trouble_with_remedy_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    environment = {
        "PRICE_KEEPER_JWT_SECRET": SECRET[:20],
        "PRICE_KEEPER_API_KEY": SECRET[:10],
        "PRICE_KEEPER__UPSTREAM__ENDPOINT": "http://127.0.0.1:9",
        "AWS_SECRET_ACCESS_KEY": f"{SECRET} {SECRET}",
        "AWS_ENDPOINT_URL_PRICING": "http://127.0.0.1:9",
    }
    result = call_in_process("doctor", folder=tmp_path, **environment)
    assert (result.returncode, result.stderr) == (1, "")
    assert "sesame" not in result.stdout
    lines = result.stdout.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("trouble ", "warning ")):
            assert lines[number + 1].strip().startswith("to fix it: "), line
    troubles = {line[9:].split("  ")[0] for line in lines if line.startswith("trouble ")}
    assert troubles == {"token keys", "admin key", "AWS credentials", "Bedrock in us-east-1"}
    found = json.loads(call_in_process("doctor", "--json", folder=tmp_path, **environment).stdout)
    assert found["status"] == "trouble"
    assert {each["name"] for each in found["checks"] if each["status"] == "trouble"} == troubles


def test_doctor_recognises_sidecar_with_tls(tmp_path: Path) -> None:
    with sidecar("dev", "--tls", "--port", "0", "--control-port", "0", folder=tmp_path) as running:
        where = ("--data-dir", "data", *ports_of(running.data, running.control))
        result = call_in_process("doctor", *where, folder=tmp_path)
    assert (result.returncode, result.stdout.count("is served by a sidecar that runs")) == (0, 2), result.stdout


@pytest.mark.parametrize("arguments", [(), ("--config", "none.yaml"), ("--data-dir", "none"), ("--nonsense",)])
def test_doctor_without_configuration_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = call_in_process("doctor", *arguments, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr


def test_doctor_reports_configuration_mistakes_like_check_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("listen:\n  dta: 127.0.0.1:1\nlabels: {}\n")
    doctor, check = (call_in_process(command, folder=tmp_path) for command in ("doctor", "check-config"))
    assert (doctor.returncode, doctor.stderr) == (2, check.stderr)


def test_hanging_credential_provider_does_not_block_doctor(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((ROOT / "config.yaml").read_text())
    (tmp_path / "aws").write_text("[profile slow]\ncredential_process = sleep 30\n")
    environment = {
        "AWS_ACCESS_KEY_ID": "",
        "AWS_SECRET_ACCESS_KEY": "",
        "AWS_PROFILE": "slow",
        "AWS_CONFIG_FILE": str(tmp_path / "aws"),
        "PRICE_KEEPER__UPSTREAM__ENDPOINT": "http://127.0.0.1:9",
    }
    began = time.monotonic()
    result = price_keeper("doctor", "--json", folder=tmp_path, **environment)
    assert time.monotonic() - began < 25
    found = {each["name"]: each for each in json.loads(result.stdout)["checks"]}
    assert found["AWS credentials"]["found"] == "no answer in 5 seconds"
    assert "credential_process" in found["AWS credentials"]["mend"]
    assert found["journal"]["status"] == "ok"


# How checks are carried out.


async def test_hanging_or_failing_check_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: DoctorContext) -> Finding:
        raise ValueError(SECRET)

    async def hangs(patient: DoctorContext) -> Finding:
        await patient.clock.sleep(60)
        raise AssertionError

    async def good(_: DoctorContext) -> Finding:
        return ok("good")

    monkeypatch.setattr(carrying, "CHECK_DEADLINE_SECONDS", 0.05)
    patient = DoctorContext(write_config(tmp_path), {}, SystemClock())
    checks = [DoctorCheck("a", hangs, "wait"), DoctorCheck("b", in_thread(fails), "mend"), DoctorCheck("c", good)]
    findings = [finding for _, finding in await run_doctor_checks(checks, patient)]
    assert findings[0] == Finding(FindingStatus.TROUBLE, "no answer in 0.05 seconds", "wait")
    assert findings[1] == Finding(FindingStatus.TROUBLE, "could not be looked at: ValueError", "mend")
    assert findings[2].status is FindingStatus.OK


# Keys.


async def test_token_key_problems_are_reported(tmp_path: Path) -> None:
    keys = (
        KeyConfig("k1", "HS256", secret_env="A_SECRET"),
        KeyConfig("k2", "EdDSA", public_key_file=str(tmp_path / "k2.pub")),
    )
    config = write_config(tmp_path, auth={"keys": keys})
    found = await run_check("token keys", config, {"A_SECRET": SECRET})
    assert found.status is FindingStatus.TROUBLE
    assert "k2.pub" in found.message
    assert "k1" not in found.message
    assert "price-keeper keys new" in found.remedy
    found = await run_check("token keys", write_config(tmp_path, auth={"keys": keys[:1]}), {"A_SECRET": SECRET})
    assert found == ok("k1 (HS256, signs)")


async def test_admin_key_problems_are_reported(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert (await run_check("admin key", config)).status is FindingStatus.WARNING
    short = await run_check("admin key", config, {"PRICE_KEEPER_API_KEY": SECRET[:9]})
    assert (short.status, "PRICE_KEEPER_API_KEY" in short.remedy) == (FindingStatus.TROUBLE, True)
    assert (await run_check("admin key", config, {"PRICE_KEEPER_API_KEY": SECRET})).status is FindingStatus.OK


# The store's file.


async def test_damaged_store_is_reported(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    path = store_path(config)
    prepare_file(path)
    with sqlite3.connect(path) as connection:
        rows = [(f"{number}", "x" * 3000) for number in range(200)]
        connection.executemany("INSERT INTO config VALUES (?, '', NULL, ?)", rows)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    assert (await run_check("store is whole", config)).status is FindingStatus.OK
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"\xff" * 8192 + whole[len(whole) // 2 + 8192 :])
    found = await run_check("store is whole", config)
    assert found.status is FindingStatus.TROUBLE
    assert ".recover" in found.remedy
    path.write_text("no database, whatever its name says, and long enough to be one" * 20)
    found = await run_check("store is whole", config)
    assert (found.status, "store.path" in found.remedy) == (FindingStatus.TROUBLE, True)


async def test_store_too_large_to_check_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    prepare_file(store_path(config))
    monkeypatch.setattr(disk_checks, "QUICK_CHECK_SECONDS", -1.0)
    monkeypatch.setattr(disk_checks, "PROGRESS_STEPS", 1)
    found = await run_check("store is whole", config)
    assert (found.status, "quick_check" in found.remedy) == (FindingStatus.WARNING, True)


async def test_store_on_network_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/export {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr(disk_checks, "_MOUNTS", mounts)
    found = await run_check("store file", write_config(tmp_path))
    assert (found.status, "nfs4" in found.message, "store.path" in found.remedy) == (FindingStatus.TROUBLE, True, True)
    mounts.write_text("/dev/sda / ext4 rw 0 0\n")
    assert (await run_check("store file", write_config(tmp_path))).status is FindingStatus.OK


# The journal.


def unwritable(folder: Path) -> Path:
    """For the superuser too, who ignores permissions."""
    folder.mkdir()
    folder.chmod(0o500)
    return Path("/proc/self/fdinfo") if os.geteuid() == 0 else folder


async def test_unwritable_journal_is_reported(tmp_path: Path) -> None:
    folder = unwritable(tmp_path / "journal")
    found = await run_check("journal", write_config(tmp_path, journal={"dir": str(folder)}))
    assert (found.status, "journal.dir" in found.remedy) == (FindingStatus.TROUBLE, True), found
    (tmp_path / "file").write_text("in the way")
    found = await run_check("journal", write_config(tmp_path, journal={"dir": str(tmp_path / "file" / "journal")}))
    assert (found.status, "journal.dir" in found.remedy) == (FindingStatus.TROUBLE, True), found


async def test_unflushed_journal_is_reported(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    folder = journal_of(config)
    assert (await run_check("journal's leftovers", config)).status is FindingStatus.OK
    (folder / f"{UlidFactory(time.time, os.urandom).new()}.seg").write_bytes(b"x" * 1000)
    found = await run_check("journal's leftovers", config)
    assert found.status is FindingStatus.WARNING
    assert found.remedy.endswith(f"price-keeper replay {folder} --config config.yaml")
    with lock_folder(folder):
        assert (await run_check("journal's leftovers", config)).status is FindingStatus.SKIPPED
        before = sorted(folder.iterdir())
        assert "belongs to a sidecar" in (await run_check("journal", config)).message
        assert sorted(folder.iterdir()) == before
    (folder / f"{UlidFactory(lambda: time.time() - 40 * 86_400, os.urandom).new()}.seg").write_bytes(b"x")
    found = await run_check("journal's leftovers", config)
    assert (found.status, "--force" in found.remedy) == (FindingStatus.TROUBLE, True)


@pytest.mark.parametrize("calls", [0, 1])
async def test_journal_with_or_without_calls_is_distinguished(tmp_path: Path, calls: int) -> None:
    """A sidecar that ended in order leaves a file as well: the beginning of what it would have written next."""
    config = write_config(tmp_path)
    folder, clock = journal_of(config), ManualClock(time.time())
    async with Engines({}).open("sqlite", tmp_path) as store, open_recording_harness(folder, store, clock) as rec:
        for _ in range(calls):
            rec.spend(1)
    assert rec.segments()
    assert (await run_check("journal's leftovers", config)).status is (
        FindingStatus.WARNING if calls else FindingStatus.OK
    )


@pytest.mark.parametrize(
    ("limit", "status"), [("LOW_SPACE_BYTES", FindingStatus.WARNING), ("MIN_SPACE_BYTES", FindingStatus.TROUBLE)]
)
async def test_nearly_full_disk_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, status: FindingStatus
) -> None:
    monkeypatch.setattr(disk_checks, limit, 2**60)
    found = await run_check("journal's room", write_config(tmp_path))
    assert (found.status, "journal.dir" in found.remedy) == (status, True)


# Ports and the certificate.


async def test_port_in_use_is_reported(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, listen={"data": Address("127.0.0.1", free_port()), "health": Address("127.0.0.1", 0)}
    )
    assert (await run_check("data port", config)).message.endswith("is free")
    assert (await run_check("health port", config)).message.endswith("any free one")
    async with run_constant_server({}, status=200, body=b'{"status": "fine"}') as port:
        config = write_config(
            tmp_path, listen={"control": Address("127.0.0.1", port), "data": Address("127.0.0.1", port)}
        )
        for name in ("control", "data"):
            found = await run_check(f"{name} port", config)
            assert (found.status, "another program" in found.message) == (FindingStatus.TROUBLE, True)
            assert f"sport = :{port}" in found.remedy
            assert f"listen.{name}" in found.remedy
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=1); input()"
    command = [sys.executable, "-c", program, "price-keeper", "serve"]  # a sidecar that hangs
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as hanging:  # noqa: ASYNC220
        port = int(hanging.stdout.readline())  # type: ignore[union-attr]
        config = write_config(tmp_path, listen={"data": Address("127.0.0.1", port)})
        found = await run_check("data port", config)
        assert (found.status, "another program" in found.message) == (FindingStatus.TROUBLE, False)
        assert f"taken by a sidecar that does not answer (process {hanging.pid}: " in found.message
        hanging.communicate("\n")
    config = write_config(tmp_path, listen={"data": Address("192.0.2.1", 8080)})
    found = await run_check("data port", config)
    assert (found.status, "listen.data" in found.remedy) == (FindingStatus.TROUBLE, True)


@pytest.mark.parametrize(
    ("days", "status", "words"),
    [
        (0, FindingStatus.OK, "is good until"),
        (340, FindingStatus.WARNING, "is good until"),
        (400, FindingStatus.TROUBLE, "expired on"),
    ],
)
async def test_expiring_certificate_is_reported(tmp_path: Path, days: int, status: FindingStatus, words: str) -> None:
    made = datetime.now(UTC) - timedelta(days=days)
    _, certificate, key = ensure_local_certificates(tmp_path / "tls", made.timestamp())
    config = write_config(tmp_path, listen={"tls": TlsConfig(str(certificate), str(key))})
    found = await run_check("certificate", config)
    assert (found.status, words in found.message) == (status, True)
    assert (status is FindingStatus.OK) is (found.remedy == "")


async def test_certificate_with_wrong_key_is_reported(tmp_path: Path) -> None:
    _, certificate, key = ensure_local_certificates(tmp_path / "tls", time.time())
    other = generate_private_key(SECP256R1())
    key.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    found = await run_check(
        "certificate", write_config(tmp_path, listen={"tls": TlsConfig(str(certificate), str(key))})
    )
    assert (found.status, "listen.tls" in found.remedy) == (FindingStatus.TROUBLE, True)


# The rest of the machine.


@pytest.mark.parametrize(
    ("most", "status"), [(400, FindingStatus.WARNING), (260, FindingStatus.TROUBLE), (65_536, FindingStatus.OK)]
)
async def test_low_descriptor_limit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, status: FindingStatus
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    found = await run_check("open files", write_config(tmp_path))
    assert (found.status, "LimitNOFILE" in found.remedy) == (status, status is not FindingStatus.OK)


@pytest.mark.parametrize(
    ("url", "status", "words"),
    [
        ("https://127.0.0.1/hooks/sesame", FindingStatus.TROUBLE, "not public"),
        ("https://localhost/hooks/sesame", FindingStatus.TROUBLE, "not public"),
        ("https://nobody.invalid/hooks/sesame", FindingStatus.TROUBLE, "does not resolve"),
        ("https://8.8.8.8/hooks/sesame", FindingStatus.OK, "nothing was sent"),
    ],
)
async def test_webhook_address_is_checked(tmp_path: Path, url: str, status: FindingStatus, words: str) -> None:
    config = write_config(tmp_path, alerts={"webhook": WebhookConfig(url, "HOOK")})
    found = await run_check("webhook", config, {"HOOK": SECRET})
    assert (found.status, words in found.message) == (status, True)
    assert "sesame" not in found.message + found.remedy
    found = await run_check("webhook", config)
    assert (found.status, "HOOK" in found.remedy) == (FindingStatus.TROUBLE, True)
