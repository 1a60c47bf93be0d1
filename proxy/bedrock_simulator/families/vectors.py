"""Embedding vectors that depend only on a seed."""

from __future__ import annotations

from random import Random


def build_unit_vector(seed: bytes, dimensions: int) -> list[float]:
    generator = Random(seed)
    raw = [generator.uniform(-1, 1) for _ in range(dimensions)]
    length = sum(value * value for value in raw) ** 0.5
    return [value / length for value in raw]


def binarize(vector: list[float]) -> list[int]:
    """The binary form of a vector, which keeps only the sign of each number."""
    return [int(value > 0) for value in vector]
