"""An alert as a value, and which thresholds of a quota are crossed. Pure.

An alert has three forms: the marker in the store, the file on disk, and the body that the webhook receives.
Thresholds are exact to the pico-dollar.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

import orjson

from price_keeper.domain import PICO_PER_MICRO, Scope, build_money_record
from price_keeper.stores import schema
from price_keeper.stores.contract import EXPIRY_ATTRIBUTE, Item, Key

MARKER_SECONDS = 7 * 86_400  # TTL of a marker after the end of its period; longer than delivery is attempted
MARKER_OWNER = "alert"


@dataclass(frozen=True, slots=True)
class Alert:
    """One crossed threshold of one quota in one period. Times are whole epoch seconds."""

    id: str
    scope: Scope
    label: str
    period: str
    ends_at: int
    threshold_pct: int
    spent_pico: int
    quota_pico: int
    raised_at: int

    @property
    def marker_key(self) -> Key:
        """Key of the marker in the store: the same in all processes that see the same threshold crossed."""
        return schema.alert_marker_key(self.scope, self.label, self.period, self.threshold_pct)

    @property
    def marker(self) -> Item:
        return {
            MARKER_OWNER: self.id,
            "raised_at_epoch": self.raised_at,
            EXPIRY_ATTRIBUTE: self.ends_at + MARKER_SECONDS,
        }

    @property
    def file_stem(self) -> str:
        """Name of its file without the suffix. Sorting the names gives the oldest first."""
        return f"{self.raised_at:012}-{self.id}"

    def is_marker_expired(self, now: float) -> bool:
        """Whether its marker may have expired, so that the store no longer shows which process raised it."""
        return now >= self.ends_at + MARKER_SECONDS

    def content(self) -> bytes:
        """The content of its file."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return orjson.dumps(values | {"scope": self.scope.key})

    @classmethod
    def from_content(cls, content: bytes) -> Alert:
        """Parses the content of a file. Raises ValueError if it is no alert."""
        try:
            values: dict[str, Any] = orjson.loads(content)
            alert = cls(**values | {"scope": Scope.from_key(values["scope"])})
            _ = alert.marker_key, alert.is_marker_expired(0), alert.body()
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(str(error)) from None
        return alert

    def body(self) -> bytes:
        """The body of the webhook request."""
        return orjson.dumps(
            {
                "id": self.id,
                "type": "threshold",
                "org": self.scope.org,
                "app": self.scope.app,
                "label": self.label,
                "period": self.period,
                "threshold_pct": self.threshold_pct,
                **build_money_record("spent_usd_micros", self.spent_pico),
                **build_money_record("quota_usd_micros", self.quota_pico),
                "resets_at": _iso(self.ends_at),
                "raised_at": _iso(self.raised_at),
            }
        )

    def __str__(self) -> str:
        """The fields of the alert for a log line."""
        return (
            f"scope={self.scope.key} label={self.label} period={self.period} threshold_pct={self.threshold_pct} "
            f"spent_usd_micros={_micros(self.spent_pico)} quota_usd_micros={_micros(self.quota_pico)} "
            f"resets_at={_iso(self.ends_at)} alert={self.id}"
        )


def _micros(pico: int) -> int:
    """Rounded to whole micro-dollars, for people."""
    return (pico + PICO_PER_MICRO // 2) // PICO_PER_MICRO


def _iso(epoch: int) -> str:
    return datetime.fromtimestamp(epoch, UTC).isoformat().replace("+00:00", "Z")


def crossed_thresholds(spent_pico: int, quota_pico: int, thresholds: Iterable[int]) -> tuple[int, ...]:
    """The thresholds in percent that are reached, lowest first. A quota of 0 counts as 100 percent spent."""
    return tuple(pct for pct in sorted(set(thresholds)) if _is_reached(spent_pico, quota_pico, pct))


def next_threshold_pico(spent_pico: int, quota_pico: int, thresholds: Iterable[int]) -> int | None:
    """The spend at which the next threshold is reached, or None if there is none."""
    if quota_pico <= 0:
        return None
    return min((at for pct in thresholds if (at := _threshold_pico(quota_pico, pct)) > spent_pico), default=None)


def _is_reached(spent_pico: int, quota_pico: int, pct: int) -> bool:
    return spent_pico >= _threshold_pico(quota_pico, pct) if quota_pico > 0 else pct <= 100


def _threshold_pico(quota_pico: int, pct: int) -> int:
    """The threshold in pico-dollars, rounded up."""
    return -(-pct * quota_pico // 100)
