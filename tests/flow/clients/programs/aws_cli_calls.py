"""The AWS command line: a process for each call. It has no operations that stream."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from telling import Call, summary_of_whole, tell, turn

AWS = Path(sys.executable).parent / "aws"
COMPLAINT = re.compile(r"An error occurred \((\w+)\) when calling the \w+ operation(?: \(.+?\))?: (.*)", re.DOTALL)


class Failed(Exception):
    pass


def opened(_: dict[str, Any]) -> Call:
    return call


def call(operation: str, arguments: dict[str, Any]) -> Any:
    if operation == "ask":
        return summary_of_whole(_aws("converse", turn(arguments)))
    return _aws(operation.replace("_", "-"), arguments)


def _aws(command: str, arguments: dict[str, Any]) -> Any:
    with TemporaryDirectory() as folder:
        body, given = Path(folder, "body"), Path(folder, "given")
        given.write_text(json.dumps(arguments))
        options = ["--cli-input-json", f"file://{given}"]
        if command == "invoke-model":
            options = ["--model-id", arguments["modelId"], "--body", arguments["body"], str(body)]
        done = _run("bedrock-runtime", command, *options)
        if done.returncode:
            raise Failed(done.stderr.strip())
        return json.loads(done.stdout) | ({"body": body.read_text()} if body.exists() else {})


def _run(*line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, AWS, *line], capture_output=True, text=True, check=False)


def describe(failure: BaseException) -> dict[str, Any]:
    found = COMPLAINT.search(str(failure))
    code, message = found.groups() if found else (None, str(failure))
    return {"kind": "exit code", "code": code, "message": message, "status": None}


if __name__ == "__main__":
    tell(_run("--version").stdout.split()[0].partition("/")[2], opened, describe)
