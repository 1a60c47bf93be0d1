"""The helpers that start `price-keeper` in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, SECONDS, build_environment, price_keeper, sidecar
from tests.support.workers import has_exited, wait_until

FREE_PORTS = ("--port", "0", "--control-port", "0")


def test_child_process_in_shared_virtual_environment_imports_this_checkout(tmp_path: Path) -> None:
    """`-S` leaves out what the virtual environment has installed, which may be the code of another checkout."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import price_keeper; print(price_keeper.__file__)"],
        cwd=tmp_path,
        env=build_environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(ROOT / "proxy" / "price_keeper" / "__init__.py"), done.stderr


def test_preloaded_command_reports_output_code_and_signal_like_a_new_process(tmp_path: Path) -> None:
    new = price_keeper("org", "list", "--nope", folder=tmp_path, PYTHONUNBUFFERED="")
    assert vars(price_keeper("org", "list", "--nope", folder=tmp_path)) == vars(new)
    assert (new.returncode, new.stdout) == (2, "")
    with sidecar("dev", *FREE_PORTS, folder=tmp_path) as running:
        assert running.process.poll() is None
        running.process.kill()
        assert running.process.wait(SECONDS) == running.process.poll() == -signal.SIGKILL
        running.process.send_signal(signal.SIGKILL)  # its id may be another process's by now, so nothing is sent


def test_preloaded_command_has_its_own_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("no: configuration\n")
    assert "config.yaml" in price_keeper("check-config", folder=tmp_path).stderr
    refused = price_keeper("check-config", folder=ROOT, PRICE_KEEPER__LISTEN__DATA="nowhere")
    assert (refused.returncode, "PRICE_KEEPER__LISTEN__DATA" in refused.stderr) == (2, True)
    assert price_keeper("check-config", folder=ROOT).returncode == 0


def test_preloading_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    program = """
import os
from tests.support.preloaded_cli import _run_server
from tests.support.workers import children
with _run_server():
    print(*children(os.getpid()), flush=True)
    os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=build_environment({}),
        capture_output=True,
        text=True,
        check=True,
    )
    wait_until(lambda: has_exited(int(done.stdout)))
