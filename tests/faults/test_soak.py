"""A few seconds of what `make soak` does for an hour: a fleet under load and faults, and every figure compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT, SECONDS

# Each agrees, or the soak ends with 1; here it is only seen that there was something to compare.
COUNTED = ("recorded exactly", "answers that callers had whole", "faults at the socket", "USD recorded", "segments")
# The same load and faults on every machine; `make soak` draws its own. These faults lose answers of the store, cut off
# Bedrock, and kill a sidecar and a worker.
SEED = "463468"


def test_short_soak_finds_every_figure_exact(tmp_path: Path) -> None:
    kept, output = tmp_path / "kept", tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--seconds", "5", "--seed", SEED]
    command += ["--keep", str(kept), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(output.read_text())["figures"]
    assert all(figures[name] for name in COUNTED), figures
