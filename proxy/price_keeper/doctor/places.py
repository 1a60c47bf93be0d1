"""The places at which Bedrock is called, each once."""

from __future__ import annotations

from typing import NamedTuple

from price_keeper.config import Config
from price_keeper.dataplane import build_regional_url
from price_keeper.forwarding.forwarder import parse_endpoint
from price_keeper.forwarding.upstream import UpstreamEndpoint


class BedrockEndpoint(NamedTuple):
    region: str
    endpoint: UpstreamEndpoint
    config_keys: str  # of the configuration, which say so
    labels: tuple[str, ...]  # that name it


def list_bedrock_endpoints(config: Config) -> list[BedrockEndpoint]:
    """The upstream's own first: what no label names goes there."""
    default_url = config.upstream.endpoint
    labels_by_endpoint = {(config.upstream.region, default_url): ["upstream"]}
    for name, label in config.labels.items():
        for each in label.endpoints:
            labels_by_endpoint.setdefault((each.region, each.endpoint or default_url), []).append(name)
    return [
        _build_bedrock_endpoint(
            region,
            url,
            "upstream.endpoint and upstream.region" if number == 0 else _format_config_key(labels[0]),
            labels,
        )
        for number, ((region, url), labels) in enumerate(labels_by_endpoint.items())
    ]


def _build_bedrock_endpoint(region: str, url: str | None, keys: str, labels: list[str]) -> BedrockEndpoint:
    return BedrockEndpoint(
        region, parse_endpoint(url or build_regional_url(region)), keys, tuple(dict.fromkeys(labels))
    )


def _format_config_key(label: str) -> str:
    return f"labels.{label}.endpoints"
