"""AWS credentials of the sidecar's own that expire, cannot be refreshed, and come back: no caller's are to blame."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bedrock_simulator import DEFAULT_KEYS

from tests.support.hanging_command import hanging_command
from tests.support.sidecar_crashes import CrashLoad, SidecarSetup
from tests.support.sidecar_trials import (
    FaultTrial,
    call_once,
    price_by_hand,
    read_counts_by_label,
    read_metric,
    read_readiness,
    run_trial,
    wait_until,
)

REFUSED = "Bedrock refuses the sidecar's own AWS credentials, which its operator must correct; the caller's are valid"
NOT_READY = "Bedrock refuses the sidecar's own AWS credentials; the log says why"
NONE = "the sidecar has no AWS credentials to call Bedrock with"
NEW_TOKEN, OLD_TOKEN = "a session token that is good", "a session token that is not"


@contextmanager
def signing(folder: Path, token: str, good_for: float) -> Iterator[tuple[FaultTrial, SidecarSetup, Path]]:
    """A sidecar whose credentials come from a command that prints a file of the test's."""
    file = folder / "credentials.json"
    provide(file, token, good_for)
    (folder / "aws").write_text(f"[default]\ncredential_process = cat {file}\n")
    with run_trial(folder, "--session-token", NEW_TOKEN.replace(" ", "-")) as trial:
        lineup = trial.add_sidecar()
        lineup.environment = {
            "AWS_CONFIG_FILE": str(folder / "aws"),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
        }
        yield trial, lineup, file


def provide(file: Path, token: str, good_for: float) -> None:
    until_when = datetime.now(UTC) + timedelta(seconds=good_for)
    keys = {"AccessKeyId": DEFAULT_KEYS.access_key, "SecretAccessKey": DEFAULT_KEYS.secret_key}
    expiry = {"SessionToken": token.replace(" ", "-"), "Expiration": until_when.strftime("%Y-%m-%dT%H:%M:%SZ")}
    file.write_text(json.dumps({"Version": 1, **keys, **expiry}))


def test_expired_sidecar_credentials_become_503_until_renewed(tmp_path: Path) -> None:
    with signing(tmp_path, OLD_TOKEN, -60) as (trial, lineup, file), lineup.run_sidecar() as running:
        token = lineup.token()
        assert call_once(lineup, token) == (503, "ServiceUnavailableException", NONE)
        wait_until(lambda: read_readiness(running.control)["bedrock"] == NONE)
        assert len(running.complaints) == running.errors.count("could not be renewed: what came is expired") == 1
        provide(file, OLD_TOKEN, 3600)  # by its own word it is good, and Bedrock does not take it
        wait_until(lambda: call_once(lineup, token)[2] != NONE)
        refused = [call_once(lineup, token) for _ in range(20)]
        assert set(refused) == {(503, "ServiceUnavailableException", REFUSED)}
        wait_until(lambda: read_readiness(running.control)["bedrock"] == NOT_READY)
        assert read_metric(running.control, 'upstream_trouble{kind="refused"}') == 1
        said = "127.0.0.1 refuses the sidecar's own AWS credentials: UnrecognizedClientException, on "
        assert running.errors.count(said) == 1
        with CrashLoad(lineup, 2, random.Random(20261119)) as load:  # with tokens that stay as they are
            provide(file, NEW_TOKEN, 3600)
            wait_until(lambda: len(load.complete_requests) > 20)
        wait_until(lambda: read_readiness(running.control)["bedrock"] == "ok")
        assert read_metric(running.control, 'upstream_trouble{kind="refused"}') == 0
        assert running.stop() == 0
        served = trial.read_used_requests()
    assert set(load.complete_requests) == set(served)
    assert read_counts_by_label(tmp_path / "price-keeper.db") == price_by_hand(served)
    print(
        f"{len(refused)} calls refused, {load.failed_calls} more under "
        f"load; {len(load.complete_requests)} answered once good ones came"
    )


def test_hanging_credential_command_does_not_block_start(tmp_path: Path) -> None:
    """Nor anything else: what needs no call of Bedrock's is served, and calls are as soon as it answers."""
    command, hangs = hanging_command(tmp_path, NEW_TOKEN.replace(" ", "-"), 3600)
    hangs.touch()
    with run_trial(tmp_path, "--session-token", NEW_TOKEN.replace(" ", "-")) as trial:
        lineup = trial.add_sidecar()
        lineup.environment = {
            "AWS_CONFIG_FILE": str(command),
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
        }
        with lineup.run_sidecar() as running:
            token = lineup.token()
            assert call_once(lineup, token) == (503, "ServiceUnavailableException", NONE)
            wait_until(lambda: read_readiness(running.control)["bedrock"] == NONE)
            assert running.errors.count("AWS credentials could not be renewed: no answer in 5 seconds") == 1
            hangs.unlink()
            wait_until(lambda: read_readiness(running.control)["bedrock"] == "ok")
            assert call_once(lineup, token)[0] == 200
            assert running.stop() == 0
