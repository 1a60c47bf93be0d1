"""The settings of an org or an app as the control API tells them, for a person to read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.calendar_days import Period, find_span
from price_keeper.commandline.terminal import BOLD, YELLOW, paint
from price_keeper.model import PICO_PER_MICRO
from price_keeper.reporting import money

_WAITING = {"timezone": "time zone", "quota_scope": "quota_scope", "period": "period"}
_OF_THE_BUDGET = ("model_ordering", "quotas", "enforcement", "sticky_fallback_enabled")
_THE_ORGS = ("timezone", "quota_scope", "period", "agg_shard_count")
_KNOWN = (
    *_THE_ORGS,
    *_OF_THE_BUDGET,
    "tight_mode_threshold_pct",
    "refresh_interval_normal_secs",
    "refresh_interval_tight_secs",
    "alert_thresholds_pct",
    "version",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """An org, or an app with the record of its org. What is not there as it should be raises whatever it raises."""

    record: Mapping[str, Any]
    above: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        own = self.record["settings"]
        return str(own.get("org_name" if self.above is None else "app_name") or self._id)

    @property
    def title(self) -> str:
        org = self.record["org"]
        return f"{self.name} ({org if self.above is None else f'{org} / {self._id}'})"

    @property
    def zone(self) -> ZoneInfo:
        try:
            return ZoneInfo(self.record["in_force"]["timezone"])
        except OSError:  # "America" is a folder of them
            raise ValueError("this is no time zone") from None

    @property
    def ordering(self) -> str:
        return " > ".join(self.record["in_force"]["model_ordering"])

    @property
    def applies_to_org(self) -> bool:
        return bool(self.record["in_force"]["quota_scope"] == "ORG")

    @property
    def passed_over(self) -> list[str]:
        return [str(line) for line in self.record["passed_over"]]

    def lines(self) -> list[str]:
        rows = [f"  {head:16}{text}{self._whence(attribute)}" for attribute, head, text in self._rows()]
        notes = list(self._notes())
        return [paint(self.title, BOLD), *rows, *(["", *notes] if notes else [])]

    @property
    def _id(self) -> str:
        return str(self.record["org" if self.above is None else "app"])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """The setting, what it is called, and what holds."""
        holds = dict(self.record["in_force"])
        period = Period(holds["period"])
        end = local(find_span(period, time.time(), self.zone).end, self.zone)
        sticky = "sticky, until the period ends" if holds["sticky_fallback_enabled"] else "for each call anew"
        thresholds = ", ".join(f"{pct} %" for pct in holds["alert_thresholds_pct"])
        normal, tight = (holds[f"refresh_interval_{name}_secs"] for name in ("normal", "tight"))
        yield "timezone", "time zone", holds["timezone"]
        yield "quota_scope", "quotas apply to", "the org as a whole" if self.applies_to_org else "each app"
        yield "period", "period", f"{period.value}, this one until {end}"
        yield "enforcement", "enforcement", holds["enforcement"]
        yield "model_ordering", "ordering", self.ordering or "none, so there is no budget"
        for label, micros in holds["quotas"].items():
            yield "quotas", "quota of", f"{label}: {money.shown(_whole(micros) * PICO_PER_MICRO)}"
        yield "sticky_fallback_enabled", "fallback", sticky
        yield "tight_mode_threshold_pct", "tight from", f"{holds['tight_mode_threshold_pct']} % of a quota"
        yield "refresh_interval_normal_secs", "spend is read", f"at least every {normal:g} s"
        yield "refresh_interval_tight_secs", "and when tight", f"every {tight:g} s"
        yield "alert_thresholds_pct", "alerts at", thresholds or "none"
        yield "agg_shard_count", "shards", str(holds["agg_shard_count"])
        for record, head in ((self.record, "limits"), (self.above or {}, "and of its org")):
            if limits := record.get("settings", {}).get("limits"):
                yield "limits", head, _limited(limits)
        # What is newer than this command is told under its own name.
        yield from ((name, name, json.dumps(holds[name])) for name in holds if name not in _KNOWN)

    def _whence(self, attribute: str) -> str:
        """Of an app: whether a setting is its own."""
        if self.above is None or attribute in _THE_ORGS or attribute == "limits":
            return ""
        applies = attribute not in _OF_THE_BUDGET or not self.applies_to_org
        return "" if applies and attribute in self.record["settings"] else "  (the org's)"

    def _notes(self) -> Iterator[str]:
        yield from (warning(line) for line in self.passed_over)
        if self.above is not None and self.applies_to_org and set(_OF_THE_BUDGET) & self.record["settings"].keys():
            yield "Quotas apply to the org as a whole: this app's own ordering, quotas and enforcement wait."
        if self.record["turns_at"] is not None:
            wanted, holds = (self.above or self.record)["settings"], self.record["in_force"]
            coming = ", ".join(
                f"{title} {wanted[name]}"
                for name, title in _WAITING.items()
                if name in wanted and wanted[name] != holds[name]
            )
            yield f"From {local(epoch(self.record['turns_at']), self.zone)} on: {coming}."


def warning(text: str) -> str:
    return paint("Warning", YELLOW) + f": {text}"


def _whole(number: object) -> int:
    if not isinstance(number, int):
        raise TypeError("this is no whole number")
    return number


def epoch(told: str) -> float:
    return datetime.fromisoformat(told).timestamp()


def _limited(limits: Mapping[str, Any]) -> str:
    rates = [f"{limits[name]:,} {what}" for name, what in (("rpm", "requests"), ("tpm", "tokens")) if name in limits]
    burst = f", {limits['burst_secs']} s of them at once" if "burst_secs" in limits else ""
    return f"{' and '.join(rates)} a minute{burst}{', each call written' if limits.get('mode') == 'exact' else ''}"


def local(at_epoch: float, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_epoch, zone).strftime("%Y-%m-%d %H:%M %Z")
