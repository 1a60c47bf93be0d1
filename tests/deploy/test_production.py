"""docs/production.md, pasted from top to bottom: its seven steps on stand-ins, and what its other parts install."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
from price_keeper import app
from price_keeper.ledger.recording import LAST_FLUSH_TIMEOUT_SECONDS, LAST_RETURN_TIMEOUT_SECONDS
from price_keeper.workers.supervisor import STOP_SECONDS

from tests.support.cluster_stand_in import write_programs
from tests.support.commands import ROOT
from tests.support.deploy_tools import DEPLOY, assert_good_config
from tests.support.doc_pages import parse_blocks
from tests.support.engines import Engines

PAGE = ROOT / "docs" / "production.md"
EKS = [each for each in parse_blocks(PAGE) if "all steps out on stand-ins" in str(each.not_run)]
UNIT = (DEPLOY / "systemd" / "price-keeper.service").read_text()
PROGRAM = "/opt/price-keeper/bin/price-keeper"


def test_page_has_at_most_eight_steps() -> None:
    part = PAGE.read_text().partition("## On EKS")[2].partition("\n## ")[0]
    assert re.findall(r"^### (\d)\. ", part, re.MULTILINE) == [str(number + 1) for number in range(len(EKS))]
    assert len(EKS) <= 8


def test_eks_steps_lead_to_a_metered_call(engines: Engines, tmp_path: Path) -> None:
    """Pasted into one shell. The region and the cluster differ from the page, so that every place of them is used."""
    endpoint = engines.endpoints["moto"]
    cluster, region = f"c{uuid4().hex[:8]}", "eu-west-2"
    network = {"subnetIds": ["subnet-1", "subnet-2"]}
    eks = boto3.client("eks", endpoint_url=endpoint, region_name=region)
    eks.create_cluster(name=cluster, roleArn="arn:aws:iam::123456789012:role/c", resourcesVpcConfig=network)
    write_programs(tmp_path / "bin")
    (tmp_path / "state").mkdir()
    (tmp_path / "clone").mkdir()
    for name in ("deploy", "Dockerfile"):
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    text = "\n".join(each.text for each in EKS)
    text = text.replace("CLUSTER=apps", f"CLUSTER={cluster}").replace("AWS_REGION=us-east-1", f"AWS_REGION={region}")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "STAND_IN": str(tmp_path / "state"),
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    shell = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        shell, cwd=tmp_path / "clone", env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^answered by premium, NORMAL, \d+ tokens$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^Acme +sample +premium +1 ", done.stdout, re.MULTILINE), done.stdout
    applied = "".join(path.read_text() for path in (tmp_path / "state").glob("*.yaml"))
    assert "registry.example.com" not in applied
    assert "111122223333" not in applied
    assert "us-east-1" not in applied


def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    (tmp_path / "price-keeper.service").write_text(UNIT.replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "price-keeper.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unit_gives_time_to_drain_and_a_place_for_the_journal(tmp_path: Path) -> None:
    settings = dict(re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE))
    takes = max(app.DRAIN_SECONDS + LAST_FLUSH_TIMEOUT_SECONDS + LAST_RETURN_TIMEOUT_SECONDS, STOP_SECONDS)
    assert int(settings["TimeoutStopSec"]) > takes
    config = (DEPLOY / "systemd" / "config.yaml").read_text()
    written = re.findall(r"(?:dir|path): (\S+)", config)
    assert len(written) == 2
    assert all(each.startswith(f"/var/lib/{settings['StateDirectory']}/") for each in written)
    assert_good_config(config, tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "acme.yaml", "price-keeper.service"])
def test_page_installs_every_file_of_the_service(name: str) -> None:
    assert f"deploy/systemd/{name}" in PAGE.read_text()
