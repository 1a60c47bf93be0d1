"""From a flame graph to what each room of the pipeline takes of a request, its own time alone. Pure."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

_FRAME = re.compile(
    r'<title>(?P<name>[^<]*?) \([\d,]+ samples?, [^<]*</title>\s*<rect[^>]*? y="(?P<y>[\d.]+)"'
    r'[^>]*? fg:x="(?P<x>\d+)" fg:w="(?P<width>\d+)"'
)

# By the beginning of a file's path; the first that fits.
_ROOMS = (
    ("proxy/price_keeper/server/", "reading the request, telling the caller"),
    ("proxy/price_keeper/parse_call", "reading the request, telling the caller"),
    ("proxy/price_keeper/auth/", "identify"),
    ("proxy/price_keeper/rates/", "admit"),
    ("proxy/price_keeper/budgets/", "select"),
    ("proxy/price_keeper/upstream/", "forward: signing, sending, reading the answer"),
    ("proxy/price_keeper/operations", "forward: signing, sending, reading the answer"),
    ("proxy/price_keeper/usage/", "meter and record"),
    ("proxy/price_keeper/ledger/", "meter and record"),
    ("proxy/price_keeper/stores/", "the store, in the background"),
    ("proxy/price_keeper/", "from room to room"),
)
ELSEWHERE = "the event loop and libraries"


class Frame(NamedTuple):
    name: str
    level: float
    begin: int
    width: int

    @property
    def end(self) -> int:
        return self.begin + self.width


def shares(svg: str) -> dict[str, float]:
    """Of all samples, by room; the largest first."""
    own: Counter[str] = Counter()
    for frame, width in _own(_frames(svg)):
        own[_room(frame.name)] += width
    whole = own.total() or 1
    return {room: width / whole for room, width in own.most_common()}


def _frames(svg: str) -> list[Frame]:
    found = _FRAME.finditer(svg)
    return [Frame(each["name"], float(each["y"]), int(each["x"]), int(each["width"])) for each in found]


def _own(frames: list[Frame]) -> list[tuple[Frame, int]]:
    """What of each frame no frame below it has. In the picture a caller stands one level above what it calls."""
    levels = sorted({frame.level for frame in frames})
    below = dict(pairwise(levels))
    by_level: dict[float, list[Frame]] = {level: [] for level in levels}
    for frame in frames:
        by_level[frame.level].append(frame)
    return [(frame, frame.width - _called(frame, by_level.get(below.get(frame.level, -1.0), []))) for frame in frames]


def _called(frame: Frame, candidates: list[Frame]) -> int:
    return sum(each.width for each in candidates if frame.begin <= each.begin and each.end <= frame.end)


def _room(name: str) -> str:
    for beginning, room in _ROOMS:
        if f"({beginning}" in name:
            return room
    return ELSEWHERE
