"""What is known of how spend grew: samples of each counter since this process started, in bounded memory. Pure.

The store keeps one total of each counter and no hours. So this is as old as the process, and says since when it knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from price_keeper.ledger.ledger_entries import Counter

MAX_CURVES = 3000  # counters; with all their points some 15 MB
MAX_UNSPENT_CURVES = 1000  # counters of which nothing is spent, of however many apps that there may not even be
MAX_SAMPLES = 240  # of one: a chart is hardly wider
MIN_SAMPLE_SECONDS = 5.0  # between two points, at first


class SpendSample(NamedTuple):
    """By this time, in epoch seconds, so much was spent, in pico-dollars."""

    at: float
    pico: int


class SpendCurve:
    """How one counter grew. Between two points a straight line is as good a guess as any."""

    __slots__ = ("_last_reported", "_min_interval", "last_seen_at", "samples")

    def __init__(self, first: SpendSample) -> None:
        self.samples = [first]
        self.last_seen_at = first.at  # it is known to have stayed as it is until then
        self._min_interval = MIN_SAMPLE_SECONDS
        self._last_reported = 0

    def add_sample(self, at: float, pico: int) -> None:
        """What is older than is known, or less, tells nothing: a counter only grows."""
        last = self.samples[-1]
        if at <= self.last_seen_at or pico < last.pico:
            return
        if pico > last.pico:
            if self.last_seen_at - last.at >= self._min_interval:
                self.samples.append(SpendSample(self.last_seen_at, last.pico))
            self._append(SpendSample(at, pico))
        self.last_seen_at = at

    def _append(self, point: SpendSample) -> None:
        """Takes the place of the last one where that is as good as as old. The first stays: since then all is known."""
        if len(self.samples) > 1 and point.at - self.samples[-2].at < self._min_interval:
            self.samples[-1] = point
            return
        self.samples.append(point)
        while len(self.samples) > MAX_SAMPLES:
            self._min_interval *= 2
            self._thin_out()

    def _thin_out(self) -> None:
        first, *inner, last = self.samples
        kept = [first]
        for point in inner:
            if point.at - kept[-1].at >= self._min_interval:
                kept.append(point)
        self.samples = [*kept, last]

    def estimate_at(self, moment: float) -> float:
        """How much was spent by then; before the first point, what it says."""
        if moment <= self.samples[0].at:
            return self.samples[0].pico
        index = bisect_left(self.samples, (moment, 0))
        if index == len(self.samples):
            return self.samples[-1].pico
        before, after = self.samples[index - 1], self.samples[index]
        return before.pico + (moment - before.at) / (after.at - before.at) * (after.pico - before.pico)

    def estimate_when_reached(self, pico: int) -> float | None:
        """When so much was spent; None where that was before anything is known, or never."""
        for before, after in pairwise(self.samples):
            if before.pico < pico <= after.pico:
                return before.at + (after.at - before.at) * (pico - before.pico) / (after.pico - before.pico)
        return None

    def has_unreported_spend(self, reported: int) -> bool:
        """Whether more was seen to be spent than somebody knows of, and he was not told so before."""
        latest = self.samples[-1].pico
        if latest <= reported or latest == self._last_reported:
            return False
        self._last_reported = latest
        return True


_CurveKey = tuple[str, str, str]  # a scope, a label, a period


class SpendHistory:
    def __init__(self) -> None:
        self._curves: dict[_CurveKey, SpendCurve] = {}
        self._unspent: dict[_CurveKey, SpendCurve] = {}

    def record(self, counter: Counter, pico: int, at: float) -> None:
        """The one that was not heard of for longest makes room."""
        key = counter[:3]
        curve = self._curves.pop(key, None) or self._unspent.pop(key, None)
        if curve is None:
            curve = SpendCurve(SpendSample(at, pico))
        else:
            curve.add_sample(at, pico)
        curves, max_curves = (
            (self._curves, MAX_CURVES) if curve.samples[-1].pico else (self._unspent, MAX_UNSPENT_CURVES)
        )
        if len(curves) >= max_curves:
            del curves[next(iter(curves))]
        curves[key] = curve

    def get(self, scope: str, label: str, period: str) -> SpendCurve | None:
        key = scope, label, period
        return self._curves.get(key) or self._unspent.get(key)

    def get_curves(self, scope: str, period: str, labels: Mapping[str, object]) -> dict[str, SpendCurve]:
        curves = ((label, self.get(scope, label, period)) for label in labels)
        return {label: course for label, course in curves if course is not None}
