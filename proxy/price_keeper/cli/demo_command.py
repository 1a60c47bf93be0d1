"""`price-keeper demo`: shows in under a minute how an app's budget falls back from label to label, and then refuses.

A child process is `price-keeper dev` in a temporary folder: a real sidecar, store and journal, with a simulated
Bedrock. This process is the administrator, who sets a small budget, and the app, which always asks for `premium`.
The child and the folder are removed at the end, also after Ctrl-C and when the terminal is closed.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from price_keeper.cli.api_client import AdminClient, build_scope_path, check_response_shape
from price_keeper.cli.dev_command import DEMO_APP, DEMO_ORG
from price_keeper.cli.output import print_json, print_lines
from price_keeper.cli.terminal import BOLD, DIM, GREEN, RED, YELLOW, PaintedText, can_show, is_terminal, paint
from price_keeper.config.config_sections import DEMO_LABELS
from price_keeper.domain import PICO_PER_MICRO, format_dollars
from price_keeper.errors import PriceKeeperError

ASKED_LABEL = "premium"
QUOTAS = {"premium": "$0.10", "standard": "$0.03", "economy": "$0.002"}
# Some 10,000 tokens, so that a handful of calls uses up each budget.
PROMPT = "A summary of this report, please. " + "The sea was calm and the market was not. " * 950
MAX_CALLS = 40  # about three times as many as the budget pays for
PAUSE_SECONDS = 0.7  # on a terminal, so that a person can follow
RESPONSE_TIMEOUT_SECONDS = 30.0
STOP_TIMEOUT_SECONDS = 15.0
_BAR_WIDTH = 20
_COLORS = {"premium": GREEN, "standard": YELLOW, "economy": RED}


@dataclass(frozen=True, slots=True)
class DemoCall:
    """One call of the app: which label served it and what that label's budget has spent now, or why it was refused."""

    asked: str
    served: str | None
    status: int
    spent_usd_micros: int | None = None
    quota_usd_micros: int | None = None
    message: str | None = None


def run_demo(args: Namespace) -> int:
    story = _Story(is_silent=args.json)
    story.tell_start()
    with (
        _treat_signals_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="price-keeper-demo-") as folder,
        _run_sidecar(Path(folder)) as sidecar,
    ):
        admin = AdminClient(Namespace(api=sidecar["control"], key_file=Path(sidecar["admin_key_file"])))
        _set_budget(admin)
        story.tell_budget()
        calls = []
        for number in range(1, MAX_CALLS + 1):
            calls.append(_send_call(sidecar, admin))
            story.tell_call(number, calls[-1], calls[-2] if number > 1 else None)
            if calls[-1].served is None:
                break
    if args.json:
        print_json({"calls": [asdict(call) for call in calls]})
    story.tell_end(calls)
    return 0


@contextmanager
def _treat_signals_as_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, so that the sidecar and the folder are removed then too."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _run_sidecar(folder: Path) -> Iterator[dict[str, Any]]:
    """`price-keeper dev` and what it prints when it is ready. Ctrl-C on the terminal does not reach it, because this
    process stops it."""
    words = ["dev", "--data-dir", str(folder / "data"), "--port", "0", "--control-port", "0", "--json"]
    log = folder / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(  # noqa: S603 - this program itself
            [sys.executable, "-m", "price_keeper.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                process.wait()
                last_line = (log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
                raise PriceKeeperError(f"the sidecar of the demo did not start: {last_line}")
            yield json.loads(line)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except BaseException as failure:  # too slow, or Ctrl-C once more
                process.kill()
                if not isinstance(failure, subprocess.TimeoutExpired):
                    raise


def _set_budget(admin: AdminClient) -> None:
    body = {
        "org_name": "Acme",
        # A zone in which the day does not end during the demo, because the budget would start anew.
        "timezone": "UTC" if datetime.now(UTC).hour < 23 else "Asia/Tokyo",
        "quota_scope": "APP",
        "model_ordering": list(QUOTAS),
        "quotas": QUOTAS,
    }
    admin.request("PUT", build_scope_path(DEMO_ORG), body)
    admin.request("PUT", build_scope_path(DEMO_ORG, DEMO_APP), {"app_name": "Shop front"})


def _send_call(sidecar: Mapping[str, Any], admin: AdminClient) -> DemoCall:
    """One Converse request at the data port, as an SDK would send it."""
    connection = http.client.HTTPConnection(urlsplit(sidecar["data"]).netloc, timeout=RESPONSE_TIMEOUT_SECONDS)
    headers = {
        "Authorization": f"Bearer {sidecar['environment']['AWS_SESSION_TOKEN']}",
        "Content-Type": "application/json",
    }
    body = json.dumps({"messages": [{"role": "user", "content": [{"text": PROMPT}]}]})
    try:
        connection.request("POST", f"/model/{ASKED_LABEL}/converse", body, headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as failure:
        raise PriceKeeperError(f"the sidecar of the demo did not answer ({type(failure).__name__})") from None
    finally:
        connection.close()
    with check_response_shape(sidecar["data"]):
        if response.status != 200:
            return DemoCall(ASKED_LABEL, None, response.status, message=str(json.loads(content)["message"]))
        served = str(response.headers["x-price-keeper-label"])
    selection = admin.request("GET", f"{build_scope_path(DEMO_ORG, DEMO_APP)}/model-selection")
    with check_response_shape(sidecar["control"]):
        budget = next(each for each in selection["labels"] if each["label"] == served)
        spent, quota = int(budget["spent_usd_micros_whole"]), int(budget["quota_usd_micros"])
    return DemoCall(ASKED_LABEL, served, response.status, spent, quota)


class _Story:
    """Prints what happens, in plain words."""

    def __init__(self, *, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._pause_seconds = PAUSE_SECONDS if is_terminal(sys.stdout) and not is_silent else 0.0
        self._blocks = ("█", "░") if can_show("█░", sys.stdout) else ("#", "-")

    def _tell(self, *lines: str) -> None:
        if not self._is_silent:
            print_lines(lines)
            sys.stdout.flush()

    def tell_start(self) -> None:
        self._tell(
            paint("One app, one small budget, and a Bedrock that costs nothing because it is simulated.", BOLD),
            "The sidecar, its store and all calls are real. Starting it, in a temporary folder ...",
            "",
        )

    def tell_budget(self) -> None:
        self._tell(
            "The administrator gives the app 'Shop front' of 'Acme' a budget for each day:",
            *(f"  {label:<9} {quota:>6}  of {DEMO_LABELS[label].model}" for label, quota in QUOTAS.items()),
            "",
            f"The app asks for {ASKED_LABEL} every time, with a prompt of about 10,000 tokens:",
        )

    def tell_call(self, number: int, call: DemoCall, before: DemoCall | None) -> None:
        time.sleep(self._pause_seconds)
        if call.served is None:
            self._tell(
                paint("  The last budget is spent. The next call is refused before it costs anything:", DIM),
                f"  call {number:>2}  " + paint("refused", RED) + f"    HTTP {call.status}",
                f"    {call.message}",
            )
            return
        if before is not None and before.served != call.served:
            self._tell(
                paint(
                    f"  The budget of {before.served} is spent, so {call.served} serves. The app changed nothing.", DIM
                )
            )
            time.sleep(self._pause_seconds)
        self._tell(self._format_call(number, call.served, call.spent_usd_micros or 0, call.quota_usd_micros or 1))

    def _format_call(self, number: int, served: str, spent: int, quota: int) -> PaintedText:
        full, empty = self._blocks
        filled = min(_BAR_WIDTH, spent * _BAR_WIDTH // quota)
        amounts = f"{format_dollars(spent * PICO_PER_MICRO)} of {format_dollars(quota * PICO_PER_MICRO)}"
        color = _COLORS.get(served, "")
        return (
            f"  call {number:>2}  served by "
            + paint(f"{served:<9}", color)
            + " "
            + paint(full * filled + empty * (_BAR_WIDTH - filled), color)
            + f"  {amounts}"
        )

    def tell_end(self, calls: list[DemoCall]) -> None:
        served = sum(call.served is not None for call in calls)
        spent = {call.served: call.spent_usd_micros or 0 for call in calls if call.served is not None}
        total = sum(spent.values()) * PICO_PER_MICRO
        self._tell(
            "",
            f"{served} calls were served for {format_dollars(total)}. Nothing of this stays on your machine.",
            "Your own app, with the same sidecar: price-keeper dev",
        )
