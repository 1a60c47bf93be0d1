"""What `price-keeper dev` prints, pasted line by line into a shell that has nothing else: no path to this environment's
programs, another working directory, and a Bedrock API key of the user's own that would go before the session token."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from price_keeper.cli.dev_command import DEMO_ORG

from tests.support.commands import ROOT, SECONDS, Sidecar, sidecar
from tests.support.doc_pages import parse_blocks

FREE_PORTS = ("--port", "0", "--control-port", "0")
BEDROCK_KEY = "ABSKQmVkcm9ja0FQSUtleS1hYmNkLWF0LTEyMzQ1Njc4OTAxMjpzZWNyZXQ="
SYSTEM_PATH = "/usr/bin:/bin"


@pytest.fixture(scope="module", params=[(), ("--tls",)], ids=["http", "https"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("dev with a space")
    with sidecar("dev", *request.param, *FREE_PORTS, folder=folder) as started:
        yield started


def commands(text: str) -> list[str]:
    """The paragraphs to be pasted. All others are prose, and end in a colon."""
    _, heading, pasted = text.partition("Paste into another shell:\n\n")
    assert heading
    return [each for each in pasted.strip().split("\n\n") if not each.endswith(":")]


def pasted(script: str, folder: Path) -> str:
    """What it prints. The first command that fails ends it."""
    environment = (f"PATH={SYSTEM_PATH}", f"AWS_BEARER_TOKEN_BEDROCK={BEDROCK_KEY}", "HOME=/nowhere")
    done = subprocess.run(
        ["env", "-i", *environment, "bash", "--noprofile", "--norc", "-euo", "pipefail"],
        input=script,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_guide_pasted_into_a_fresh_shell_in_another_folder_works_line_by_line(running: Sidecar, tmp_path: Path) -> None:
    environment, call, look, *renewing = commands(running.startup_output)
    assert "'assistant'" in pasted("\n".join([environment, call]), tmp_path)
    spent, org = (pasted("\n".join([environment, line]), tmp_path) for line in look.splitlines())
    assert spent.startswith("Spend of today")
    assert f"demo ({DEMO_ORG})" in org
    assert len(renewing) == ("https://" not in running.startup_output)  # botocore would not trust that address
    for lines in renewing:
        assert "'assistant'" in pasted("\n".join([environment, lines, call]), tmp_path)


def test_guide_names_the_admin_key_file_by_an_absolute_path(running: Sidecar) -> None:
    found = re.search(r"admin key +in (.+), for the control API", running.startup_output)
    assert found
    assert Path(found[1]).is_absolute()
    assert Path(found[1]).is_file()


def test_first_steps_import_nothing_but_what_a_run_installs(running: Sidecar) -> None:
    locked = (ROOT / "requirements" / "run.lock").read_text()
    first_steps = [block.text for block in parse_blocks(ROOT / "README.md") if block.is_run] + commands(
        running.startup_output
    )
    imported = {name for text in first_steps for name in re.findall(r"\bimport (\w+)", text)}
    assert imported == {"boto3"}
    assert all(re.search(rf"^{name}==", locked, re.MULTILINE) for name in imported)
