"""The compose files: their commands are accepted, containers have minimal rights, and time to stop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from price_keeper import app
from price_keeper.cli.root_parser import build_root_parser
from price_keeper.ledger.recording import LAST_FLUSH_TIMEOUT_SECONDS, LAST_RETURN_TIMEOUT_SECONDS

from tests.support.deploy_tools import DEPLOY, assert_good_config

BASE = DEPLOY / "docker-compose.yaml"
SIMULATED = DEPLOY / "docker-compose.simulated.yaml"


def services(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["services"]
    return found


def test_app_shares_network_of_sidecar_and_waits_for_it() -> None:
    app_, sidecar = services(BASE)["app"], services(BASE)["sidecar"]
    assert app_["network_mode"] == "service:sidecar"
    assert app_["depends_on"] == {"sidecar": {"condition": "service_healthy"}}
    assert "ports" not in sidecar  # its data port has no token to ask for
    assert app_["environment"]["AWS_ENDPOINT_URL_BEDROCK_RUNTIME"] == "http://127.0.0.1:8080"


def test_mounted_files_exist_and_journal_is_a_volume() -> None:
    whole = yaml.safe_load(BASE.read_text())
    for service in whole["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in whole["volumes"]
    assert "journal:/var/lib/price-keeper" in whole["services"]["sidecar"]["volumes"]


def test_containers_are_non_root_and_read_only() -> None:
    for service in services(BASE).values():
        assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", service["user"])
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_stop_grace_covers_drain() -> None:
    seconds = int(services(BASE)["sidecar"]["stop_grace_period"].removesuffix("s"))
    assert seconds > app.DRAIN_SECONDS + LAST_FLUSH_TIMEOUT_SECONDS + LAST_RETURN_TIMEOUT_SECONDS


def test_command_and_configuration_are_accepted(tmp_path: Path) -> None:
    sidecar = services(BASE)["sidecar"]
    build_root_parser().parse_args(sidecar["command"])
    text = (DEPLOY / "docker" / "config.yaml").read_text()
    overrides = {
        name: value
        for name, value in services(SIMULATED)["sidecar"]["environment"].items()
        if name.startswith("PRICE_KEEPER__")
    }
    assert overrides
    assert_good_config(text, tmp_path)
    assert_good_config(text, tmp_path, **overrides)


def test_probe_uses_configured_port() -> None:
    config = yaml.safe_load((DEPLOY / "docker" / "config.yaml").read_text())
    (code,) = [each for each in services(BASE)["sidecar"]["healthcheck"]["test"] if "import" in each]
    assert f"'{config['listen']['control']}'" in code
    compile(code, "healthcheck", "exec")
