"""One sidecar that does everything once, is killed with calls under way, and whose journal is brought to the store."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from price_keeper.clock import SystemClock
from price_keeper.ledger.aggregator import Aggregator
from price_keeper.ledger.ledger_entries import LineKind
from price_keeper.ledger.total_sweep import TotalSweep
from price_keeper.stores.sqlite import SqliteStore

from tests.public_contract import answers, kept
from tests.public_contract.shapes import fields_of
from tests.support.commands import SECONDS, call_in_process
from tests.support.observed_sidecar import ENVIRONMENT, ORG, ObservedSidecar, run_observed, samples_of, token
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.support.price_fleet import open_fleet
from tests.support.simulated import BedrockProcess, bedrock_process

# Which of them there are depends on who uses the product.
_OPEN = {"app", "compiled", "label", "le", "model", "org", "python", "region", "version"}
# Which way is taken depends on who else is there; these are all.
_WAYS = {"path": ["adjust", "create", "normal", "refused", "retry"]}

_COMMANDS = (
    ("version",),
    ("check-config",),
    ("doctor",),
    ("tables", "check"),
    ("tables", "describe"),
    ("spend", "--by", "org,app,label,day"),
    ("export", "today", "--out", "spend.csv"),
    ("audit", ORG),
    ("org", "list"),
    ("org", "show", ORG),
    ("app", "list", ORG),
    ("app", "show", ORG, "watched"),
    ("override", "set", ORG, "economy", "--app", "shadow", "--reason", "a test"),
    ("override", "show", ORG, "--app", "shadow"),
    ("override", "clear", ORG, "--app", "shadow"),
    ("rotate", ORG, "--app", "falls", "--grace", "1"),
    ("session", "list", ORG, "--app", "watched"),
    ("keys", "new", "--kid", "next", "--out", "keys"),
)


def played(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with otlp_receiver() as receiver, bedrock_process() as bedrock:
        chosen = {
            "telemetry": {"otlp_endpoint": receiver.url, "log_level": "info"},
            "alerts": {"webhook": {"url": "https://localhost:9/hook", "secret_env": "PRICE_KEEPER_WEBHOOK_SECRET"}},
            "aggregator": {"interval_secs": 1},
            "guardrails": answers.GUARDRAILS,
        }
        with (
            patch.dict(os.environ, _SECRETS),
            run_observed(folder, bedrock.url, answers.LABELS, **chosen) as it,
        ):
            secret = answers.settings(it)
            found["data port"] = answers.data_port(it, secret)
            answers.sessions(it, secret)
            document = json.loads(it.control("GET", "/openapi.json").body)
            found["control port"] = answers.control_api(document)
            until(lambda: not _pending(it, folder), lambda: _pending(it, folder))
            found["status events"] = _events(it)
            found["metrics"] = _metrics(it)
            found["command output"] = _outputs(folder, it)
            found["store"] = kept.tables(folder / "price-keeper.db")
            die(it, bedrock, folder)
            found["journal"] = kept.journal(folder / "journal")
        found["traces"] = _traces(receiver)
    found["command output"]["replay"] = _replayed(folder)
    found["store"]["pricing-cache"] = asyncio.run(_prices(folder))
    markers = found["store"]["request-dedup"]
    markers["rows"] = dict(sorted((markers["rows"] | asyncio.run(_swept(folder))).items()))
    return found


# What the calls set off and do not wait for, as often as it happens in one play.
_COUNTS = {
    "calls_open": 0,
    "requests_under_way": 0,
    "unflushed_usd": 0,
    "journal_segments_waiting": 0,
    "budget_moves_total": 1,  # the app that is served by another label
    "alerts_raised_total": 12,  # for three apps, at four thresholds each
    "webhooks_waiting": 12,
}
# Rows of the store, some with an attribute that not all rows of their kind have.
_ROWS = (
    "audit:",
    "config:.*/ APP#",
    "config:.*/ CONFIG",
    "config:.*/ PROFILE#",
    "config: REGISTRY#",
    "daily-total:",
    "rate-buckets:.*/ BUCKET#RATE",
    "rate-buckets:.*/ BUCKET#HARD",
    "rate-buckets:.*/ HOLD#.* out",
    "rate-buckets:.*/ HOLD#.* used",
    "rate-buckets: CONTROL#",
    "request-dedup: ACTIVE#",
    "request-dedup: ALERT#",
    "request-dedup: REQ#",
    "request-dedup: SEG#",
    "revoked-tokens: SID#",
    "revoked-tokens: {uuid}",
    "secret-retrieval-tokens:",
    "sessions: BLOCK#",
    "sessions:.*/ HEAD",
    "sessions:.*/ SESSION#",
    "sticky-state:.* active_model_label",
    "sticky-state:.* override_label",
    "usage-agg-sharded:",
)
_NOTED = ("limits", "override_label", "active_model_label")


def _pending(it: ObservedSidecar, folder: Path) -> list[str]:
    """What has not happened yet."""
    scrape = it.scrape()
    missing = [f"{name} {count}" for name, count in _COUNTS.items() if scrape.value(name) != count]
    if scrape.value("spans_total", what="exported") != scrape.value("spans_total", what="made"):
        missing.append("spans")
    rows = kept.row_attributes(folder / "price-keeper.db")
    missing += [each for each in _ROWS if not any(re.match(each.replace("{", r"\{"), row) for row in rows)]
    notes = folder / "journal" / "notes-0"
    noted = notes.read_bytes() if notes.exists() else b""
    return missing + [each for each in _NOTED if f'"{each}"'.encode() not in noted]


def _metrics(it: ObservedSidecar) -> dict[str, Any]:
    text = it.scrape().text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    found: dict[str, Any] = {name: {"kind": kind} for name, kind in sorted(kinds.items())}
    for sample in samples_of(text):
        name = sample.name if sample.name in kinds else sample.name.rpartition("_")[0]
        for label, value in sample.labels.items():
            values = found[name].setdefault("labels", {}).setdefault(label, set())
            if label not in _OPEN:
                values.update(_WAYS.get(label, [value]))
    for samples in found.values():
        if "labels" in samples:
            samples["labels"] = {label: sorted(values) or "any" for label, values in sorted(samples["labels"].items())}
    return found


def _events(it: ObservedSidecar) -> dict[str, Any]:
    """The first of the events that the status page listens to."""
    asked = urllib.request.Request(f"{it.running.control}/status/events", headers=_ADMIN)
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:
        lines = (line.decode().rstrip("\n") for line in answer)
        data = next(line for line in lines if line.startswith("data: "))
    return fields_of([json.loads(data.removeprefix("data: "))])


_ADMIN = {"X-API-Key": answers.ADMIN_KEY}
_SECRETS = {"PRICE_KEEPER_WEBHOOK_SECRET": "a secret of a receiver"}


def _outputs(folder: Path, it: ObservedSidecar) -> dict[str, Any]:
    found = {}
    for words in _COMMANDS:
        done = call_in_process(
            *words, "--json", folder=folder, **ENVIRONMENT | _SECRETS | answers.shown_to(it.running.control)
        )
        assert done.returncode in (0, 1), (words, done.stderr)
        name = " ".join(
            word for word in words if re.fullmatch(r"[a-z-]+", word) and word not in ("watched", "falls", "shadow")
        )
        found[name.partition(" --")[0]] = fields_of([json.loads(done.stdout)])
    for form in ("--csv", "--focus"):
        done = call_in_process("spend", form, "--billing-account", "123456789012", folder=folder, **ENVIRONMENT)
        if form == "--csv":
            done = call_in_process("spend", form, folder=folder, **ENVIRONMENT)
        found[f"spend {form}"] = done.stdout.splitlines()[0].split(",")
    wrong = call_in_process("org", "show", "nobody", "--json", folder=folder, **answers.shown_to(it.running.control))
    found["an error"] = fields_of([json.loads(wrong.stdout or wrong.stderr)])
    return found


def die(it: ObservedSidecar, bedrock: BedrockProcess, folder: Path) -> None:
    """With calls in flight, while the store is locked: nothing is flushed, and some calls are carried."""
    shown = (token(), token(), token("shadow"), token("shop", answers.HARD))
    calls = [threading.Thread(target=_called, args=(it, each)) for each in shown]
    bedrock.plan(always={"latency_ms": 1000 * SECONDS})
    for call in calls:
        call.start()
    until(lambda: it.value("calls_open") == len(calls))
    bedrock.plan(always={})
    with closing(sqlite3.connect(folder / "price-keeper.db", isolation_level=None)) as database:
        database.execute("BEGIN IMMEDIATE")
        assert [it.call().status, it.call(body=None).status] == [200, 400]  # the second costs nothing
        words = {kind.value for kind in LineKind}
        until(lambda: words <= kept.words_of(folder / "journal"), lambda: kept.words_of(folder / "journal"))
        it.running.stop(signal.SIGKILL)
    for call in calls:
        call.join()


def _called(it: ObservedSidecar, shown: str) -> None:
    with suppress(OSError):
        it.call(body=answers.SHORT, Authorization=f"Bearer {shown}")


async def _prices(folder: Path) -> Any:
    with patch.dict(os.environ, ENVIRONMENT):
        async with open_fleet(folder) as fleet:
            await fleet.start_sidecar()
        return kept.tables(folder / "store.db")["pricing-cache"]


async def _swept(folder: Path) -> Any:
    """What a sweep keeps of itself: a sidecar makes the first one minutes after its start."""
    store, clock = await SqliteStore(folder / "swept.db", time.time).open(), SystemClock()
    await TotalSweep(store, clock, Aggregator(store, clock, 60.0)).run()
    await store.close()
    return kept.tables(folder / "swept.db")["request-dedup"]["rows"]


def _replayed(folder: Path) -> Any:
    shutil.copytree(folder / "journal", folder / "found")
    done = call_in_process("replay", "found", "--json", folder=folder, **ENVIRONMENT)
    assert done.returncode in (0, 1), done.stderr
    return fields_of([json.loads(done.stdout)])


def _traces(receiver: OtlpReceiver) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for span in receiver.spans:
        found.setdefault(span.name, {}).update(span.attributes)
    return {
        "resource": sorted({name for span in receiver.spans for name in span.resource if name.startswith("service.")}),
        "spans": {name: fields_of([attributes]) for name, attributes in sorted(found.items())},
    }


def until(is_so: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
