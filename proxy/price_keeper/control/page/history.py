"""What is known of how spend grew: samples of each counter since this process started, in bounded memory. Pure.

The store keeps one total of each counter and no hours. So this is as old as the process, and says since when it knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from price_keeper.recording.entries import Counter

MOST_COURSES = 3000  # counters; with all their points some 15 MB
MOST_UNSPENT = 1000  # counters of which nothing is spent, of however many apps that there may not even be
MOST_POINTS = 240  # of one: a chart is hardly wider
LEAST_SECONDS = 5.0  # between two points, at first


class Point(NamedTuple):
    """By this time, in epoch seconds, so much was spent, in pico-dollars."""

    at: float
    pico: int


class Course:
    """How one counter grew. Between two points a straight line is as good a guess as any."""

    __slots__ = ("_apart", "_told", "points", "seen")

    def __init__(self, first: Point) -> None:
        self.points = [first]
        self.seen = first.at  # it is known to have stayed as it is until then
        self._apart = LEAST_SECONDS
        self._told = 0

    def learn(self, at: float, pico: int) -> None:
        """What is older than is known, or less, tells nothing: a counter only grows."""
        last = self.points[-1]
        if at <= self.seen or pico < last.pico:
            return
        if pico > last.pico:
            if self.seen - last.at >= self._apart:
                self.points.append(Point(self.seen, last.pico))
            self._add(Point(at, pico))
        self.seen = at

    def _add(self, point: Point) -> None:
        """Takes the place of the last one where that is as good as as old. The first stays: since then all is known."""
        if len(self.points) > 1 and point.at - self.points[-2].at < self._apart:
            self.points[-1] = point
            return
        self.points.append(point)
        while len(self.points) > MOST_POINTS:
            self._apart *= 2
            self._thin_out()

    def _thin_out(self) -> None:
        first, *between, last = self.points
        kept = [first]
        for point in between:
            if point.at - kept[-1].at >= self._apart:
                kept.append(point)
        self.points = [*kept, last]

    def at(self, moment: float) -> float:
        """How much was spent by then; before the first point, what it says."""
        if moment <= self.points[0].at:
            return self.points[0].pico
        place = bisect_left(self.points, (moment, 0))
        if place == len(self.points):
            return self.points[-1].pico
        before, after = self.points[place - 1], self.points[place]
        return before.pico + (moment - before.at) / (after.at - before.at) * (after.pico - before.pico)

    def reached(self, pico: int) -> float | None:
        """When so much was spent; None where that was before anything is known, or never."""
        for before, after in pairwise(self.points):
            if before.pico < pico <= after.pico:
                return before.at + (after.at - before.at) * (pico - before.pico) / (after.pico - before.pico)
        return None

    def is_news(self, known: int) -> bool:
        """Whether more was seen to be spent than somebody knows of, and he was not told so before."""
        last = self.points[-1].pico
        if last <= known or last == self._told:
            return False
        self._told = last
        return True


_Name = tuple[str, str, str]  # a scope, a label, a period


class History:
    def __init__(self) -> None:
        self._courses: dict[_Name, Course] = {}
        self._unspent: dict[_Name, Course] = {}

    def learn(self, counter: Counter, pico: int, at: float) -> None:
        """The one that was not heard of for longest makes room."""
        name = counter[:3]
        course = self._courses.pop(name, None) or self._unspent.pop(name, None)
        if course is None:
            course = Course(Point(at, pico))
        else:
            course.learn(at, pico)
        kept, most = (self._courses, MOST_COURSES) if course.points[-1].pico else (self._unspent, MOST_UNSPENT)
        if len(kept) >= most:
            del kept[next(iter(kept))]
        kept[name] = course

    def of(self, scope: str, label: str, period: str) -> Course | None:
        name = scope, label, period
        return self._courses.get(name) or self._unspent.get(name)

    def courses(self, scope: str, period: str, labels: Mapping[str, object]) -> dict[str, Course]:
        found = ((label, self.of(scope, label, period)) for label in labels)
        return {label: course for label, course in found if course is not None}
