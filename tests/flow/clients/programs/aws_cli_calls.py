"""The AWS command line: a process for each call. It has no operations that stream."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from telling import Call, tell, told_whole, turn

AWS = Path(sys.executable).parent / "aws"
COMPLAINT = re.compile(r"An error occurred \((\w+)\) when calling the \w+ operation(?: \(.+?\))?: (.*)", re.DOTALL)


class Failed(Exception):
    pass


def opened(_: dict[str, Any]) -> Call:
    return call


def call(operation: str, arguments: dict[str, Any]) -> Any:
    if operation == "ask":
        return told_whole(_aws("converse", turn(arguments)))
    return _aws(operation.replace("_", "-"), arguments)


def _aws(command: str, arguments: dict[str, Any]) -> Any:
    with TemporaryDirectory() as folder:
        body, given = Path(folder, "body"), Path(folder, "given")
        given.write_text(json.dumps(arguments))
        output = [str(body)] if command == "invoke-model" else []
        line = [sys.executable, AWS, "bedrock-runtime", command, "--cli-input-json", f"file://{given}", *output]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Failed(done.stderr.strip())
        return json.loads(done.stdout) | ({"body": body.read_text()} if output else {})


def describe(failure: BaseException) -> dict[str, Any]:
    found = COMPLAINT.search(str(failure))
    code, message = found.groups() if found else (None, str(failure))
    return {"kind": "exit code", "code": code, "message": message, "status": None}


if __name__ == "__main__":
    line = subprocess.run([sys.executable, AWS, "--version"], capture_output=True, text=True, check=True).stdout
    tell(line.split()[0].partition("/")[2], opened, describe)
