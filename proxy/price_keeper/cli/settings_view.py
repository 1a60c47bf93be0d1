"""The settings of an org or app from the control API, formatted for people: each setting, its value and its origin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from price_keeper.cli.terminal import BOLD, YELLOW, paint
from price_keeper.domain import PICO_PER_MICRO
from price_keeper.org_calendar import Period, find_span
from price_keeper.reports import money

_PENDING_TITLES = {"timezone": "time zone", "quota_scope": "quota_scope", "period": "period"}
_BUDGET_SETTINGS = ("model_ordering", "quotas", "enforcement", "sticky_fallback_enabled")
_ORG_ONLY_SETTINGS = ("timezone", "quota_scope", "period", "agg_shard_count")
_KNOWN_SETTINGS = (
    *_ORG_ONLY_SETTINGS,
    *_BUDGET_SETTINGS,
    "tight_mode_threshold_pct",
    "refresh_interval_normal_secs",
    "refresh_interval_tight_secs",
    "alert_thresholds_pct",
    "version",
)


@dataclass(frozen=True, slots=True)
class SettingsView:
    """An org, or an app with the record of its org.

    A malformed record raises LookupError, TypeError or ValueError; use it inside `check_response_shape`.
    """

    record: Mapping[str, Any]
    org_record: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        settings = self.record["settings"]
        return str(settings.get("org_name" if self.org_record is None else "app_name") or self._id)

    @property
    def title(self) -> str:
        org = self.record["org"]
        return f"{self.name} ({org if self.org_record is None else f'{org} / {self._id}'})"

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
    def unlimited_labels(self) -> list[str]:
        """The labels of the ordering that have no quota."""
        in_force = self.record["in_force"]
        return [str(label) for label in in_force["model_ordering"] if label not in in_force["quotas"]]

    @property
    def applies_to_org(self) -> bool:
        return bool(self.record["in_force"]["quota_scope"] == "ORG")

    @property
    def problems(self) -> list[str]:
        return [str(line) for line in self.record["passed_over"]]

    def format_lines(self) -> list[str]:
        rows = [
            f"  {head:16}{text}{self._describe_origin(attribute)}" for attribute, head, text in self._iterate_rows()
        ]
        notes = list(self._iterate_notes())
        return [paint(self.title, BOLD), *rows, *(["", *notes] if notes else [])]

    @property
    def _id(self) -> str:
        return str(self.record["org" if self.org_record is None else "app"])

    def _iterate_rows(self) -> Iterator[tuple[str, str, str]]:
        """The setting's key, its name for people, and the effective value."""
        in_force = dict(self.record["in_force"])
        period = Period(in_force["period"])
        end = format_local_time(find_span(period, time.time(), self.zone).end, self.zone)
        sticky = "sticky, until the period ends" if in_force["sticky_fallback_enabled"] else "for each call anew"
        thresholds = ", ".join(f"{pct} %" for pct in in_force["alert_thresholds_pct"])
        normal, tight = (in_force[f"refresh_interval_{name}_secs"] for name in ("normal", "tight"))
        yield "timezone", "time zone", in_force["timezone"]
        yield "quota_scope", "quotas apply to", "the org as a whole" if self.applies_to_org else "each app"
        yield "period", "period", f"{period.value}, this one until {end}"
        yield "enforcement", "enforcement", in_force["enforcement"]
        yield "model_ordering", "ordering", self.ordering or "none, so there is no budget"
        for label, micros in in_force["quotas"].items():
            yield "quotas", "quota of", f"{label}: {money.format_usd(_require_integer(micros) * PICO_PER_MICRO)}"
        for label in self.unlimited_labels:
            yield "quotas", "quota of", f"{label}: unlimited"
        yield "sticky_fallback_enabled", "fallback", sticky
        yield "tight_mode_threshold_pct", "tight from", f"{in_force['tight_mode_threshold_pct']} % of a quota"
        yield "refresh_interval_normal_secs", "spend is read", f"at least every {normal:g} s"
        yield "refresh_interval_tight_secs", "and when tight", f"every {tight:g} s"
        yield "alert_thresholds_pct", "alerts at", thresholds or "none"
        yield "agg_shard_count", "shards", str(in_force["agg_shard_count"])
        for record, heading in ((self.record, "limits"), (self.org_record or {}, "and of its org")):
            if limits := record.get("settings", {}).get("limits"):
                yield "limits", heading, _format_limits(limits)
        # A setting that is newer than this command is shown under its key.
        yield from ((name, name, json.dumps(in_force[name])) for name in in_force if name not in _KNOWN_SETTINGS)

    def _describe_origin(self, attribute: str) -> str:
        """For an app: whether it inherits the setting from its org."""
        if self.org_record is None or attribute in _ORG_ONLY_SETTINGS or attribute == "limits":
            return ""
        is_effective = attribute not in _BUDGET_SETTINGS or not self.applies_to_org
        return "" if is_effective and attribute in self.record["settings"] else "  (the org's)"

    def _iterate_notes(self) -> Iterator[str]:
        yield from (format_warning(line) for line in self.problems)
        if (
            self.org_record is not None
            and self.applies_to_org
            and set(_BUDGET_SETTINGS) & self.record["settings"].keys()
        ):
            yield "Quotas apply to the org as a whole: this app's own ordering, quotas and enforcement wait."
        if self.record["turns_at"] is not None:
            wanted, in_force = (self.org_record or self.record)["settings"], self.record["in_force"]
            changes = ", ".join(
                f"{title} {wanted[name]}"
                for name, title in _PENDING_TITLES.items()
                if name in wanted and wanted[name] != in_force[name]
            )
            yield f"From {format_local_time(parse_time(self.record['turns_at']), self.zone)} on: {changes}."


def format_warning(text: str) -> str:
    return paint("Warning", YELLOW) + f": {text}"


def _require_integer(number: object) -> int:
    if not isinstance(number, int):
        raise TypeError("this is no whole number")
    return number


def parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _format_limits(limits: Mapping[str, Any]) -> str:
    rates = [f"{limits[name]:,} {what}" for name, what in (("rpm", "requests"), ("tpm", "tokens")) if name in limits]
    burst = f", {limits['burst_secs']} s of them at once" if "burst_secs" in limits else ""
    return f"{' and '.join(rates)} a minute{burst}{', each call written' if limits.get('mode') == 'exact' else ''}"


def format_local_time(at_epoch: float, zone: ZoneInfo) -> str:
    return datetime.fromtimestamp(at_epoch, zone).strftime("%Y-%m-%d %H:%M %Z")
