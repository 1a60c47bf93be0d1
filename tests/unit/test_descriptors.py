"""As many connections as there are descriptors for, with room for the calls that they lead to."""

from __future__ import annotations

import resource

import pytest
from price_keeper.server.server_limits import (
    DEFAULT_LIMITS,
    RESERVED_DESCRIPTORS,
    UNLIMITED_DESCRIPTORS,
    fit_to_descriptors,
    raise_descriptor_limit,
)


@pytest.mark.parametrize("descriptors", [*range(350, 2000, 50), 4096, 20_000, 65_536, 10**9])
def test_limits_fit_into_descriptors(descriptors: int) -> None:
    limits = fit_to_descriptors(descriptors)
    assert limits.connections >= 16
    assert limits.connections + limits.surplus_connections + limits.requests + RESERVED_DESCRIPTORS <= descriptors
    assert limits.connections <= DEFAULT_LIMITS.connections


def test_plenty_of_descriptors_give_default_limits() -> None:
    assert fit_to_descriptors(UNLIMITED_DESCRIPTORS) == DEFAULT_LIMITS


def test_few_descriptors_still_allow_connections() -> None:
    assert fit_to_descriptors(64).connections > 0


@pytest.mark.parametrize(
    ("limits", "refused", "expected", "asked"),
    [
        ((256, 4096), (), 4096, [(4096, 4096)]),
        ((4096, 4096), (), 4096, []),
        ((256, resource.RLIM_INFINITY), (), UNLIMITED_DESCRIPTORS, [(resource.RLIM_INFINITY,) * 2]),
        (
            (256, resource.RLIM_INFINITY),
            (resource.RLIM_INFINITY,),
            UNLIMITED_DESCRIPTORS,
            [(resource.RLIM_INFINITY,) * 2, (UNLIMITED_DESCRIPTORS, resource.RLIM_INFINITY)],
        ),
        ((256, 300), (300,), 256, [(300, 300)]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), (), UNLIMITED_DESCRIPTORS, []),
    ],
)
def test_descriptor_limit_is_raised_to_maximum(
    limits: tuple[int, int],
    refused: tuple[int, ...],
    expected: int,
    asked: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[int, int]] = []

    def set_limit(_: int, wanted: tuple[int, int]) -> None:
        heard.append(wanted)
        if wanted[0] in refused:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert (raise_descriptor_limit(), heard) == (expected, asked)
