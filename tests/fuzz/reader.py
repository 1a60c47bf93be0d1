"""Choices out of a fuzzer's bytes. It needs no fuzzer, so that what was found can be played anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
MOST_PIECES = 2000  # or an input is slow for no reason of the product's


class Reader:
    """When the bytes are used up, each choice is the first and what is taken is empty: every input means something."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece

    def rest(self) -> bytes:
        return self.take(self.left)

    def byte(self) -> int:
        return self.take(1)[0] if self.left else 0

    def number(self, size: int) -> int:
        """Of so many bytes."""
        return int.from_bytes(self.take(size), "big")

    def pick(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def some(self) -> bytes:
        """A few bytes, as many as the next one says."""
        return self.take(self.byte() % 64)


def pieces(data: bytes, seed: int) -> list[bytes]:
    """The same bytes as packets may bring them: one by one, in twos and threes, or cut at chance."""
    if seed < 4:
        size = max(seed + 1, len(data) // MOST_PIECES)
        return [data[at : at + size] for at in range(0, len(data), size)]
    chance = random.Random(seed)
    ends = sorted({0, len(data), *(chance.randrange(len(data) + 1) for _ in range(1 + seed % 5))})
    return [data[start:end] for start, end in itertools.pairwise(ends)]
