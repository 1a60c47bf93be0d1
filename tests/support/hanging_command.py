"""A command that provides AWS credentials, or hangs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bedrock_simulator import DEFAULT_KEYS


def hanging_command(folder: Path, token: str, lifetime: float) -> tuple[Path, Path]:
    """What AWS_CONFIG_FILE is to say; and a file: while that is there, the command hangs."""
    until = datetime.now(UTC) + timedelta(seconds=lifetime)
    keys = {"AccessKeyId": DEFAULT_KEYS.access_key, "SecretAccessKey": DEFAULT_KEYS.secret_key, "SessionToken": token}
    answer = json.dumps({"Version": 1, **keys, "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")})
    hangs, command, config_file = folder / "hangs", folder / "command", folder / "aws"
    command.write_text(f"#!/bin/sh\nwhile [ -e {hangs} ]; do sleep 0.05; done\necho '{answer}'\n")
    command.chmod(0o700)
    config_file.write_text(f"[default]\ncredential_process = {command}\n")
    return config_file, hangs
