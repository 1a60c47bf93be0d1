"""The places at which Bedrock is called, each once."""

from __future__ import annotations

from typing import NamedTuple

from price_keeper.config import Config
from price_keeper.dataplane import regional_url
from price_keeper.forwarding.forwarder import endpoint_of
from price_keeper.forwarding.upstream import Endpoint


class Place(NamedTuple):
    region: str
    endpoint: Endpoint
    keys: str  # of the configuration, which say so
    labels: tuple[str, ...]  # that name it


def bedrock_places(config: Config) -> list[Place]:
    """The upstream's own first: what no label names goes there."""
    own = config.upstream.endpoint
    places = {(config.upstream.region, own): ["upstream"]}
    for name, label in config.labels.items():
        for each in label.endpoints:
            places.setdefault((each.region, each.endpoint or own), []).append(name)
    return [
        _place(region, url, "upstream.endpoint and upstream.region" if number == 0 else _keys(labels[0]), labels)
        for number, ((region, url), labels) in enumerate(places.items())
    ]


def _place(region: str, url: str | None, keys: str, labels: list[str]) -> Place:
    return Place(region, endpoint_of(url or regional_url(region)), keys, tuple(dict.fromkeys(labels)))


def _keys(label: str) -> str:
    return f"labels.{label}.endpoints"
