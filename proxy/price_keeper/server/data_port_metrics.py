"""Register the metrics of the data port. Each is read from the component that counts it when /metrics is scraped."""

from __future__ import annotations

from price_keeper.server.listener import Listener
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry, Samples
from price_keeper.telemetry.request_stats import STATUSES, RequestStats
from price_keeper.upstream.forwarder import Forwarder
from price_keeper.upstream.retry_joiner import RetryJoiner

_PROTOCOLS = ("http/1.1", "h2", "unknown")


def register_data_port_metrics(
    registry: MetricsRegistry,
    request_stats: RequestStats,
    retry_joiner: RetryJoiner,
    listener: Listener,
    forwarder: Forwarder,
) -> None:
    _register_request_metrics(registry, request_stats)
    registry.add(metrics.JOINED_RETRIES, lambda: retry_joiner.joined)
    registry.add(
        metrics.CONNECTIONS,
        lambda: [({"protocol": protocol}, listener.connections[protocol]) for protocol in _PROTOCOLS],
    )
    registry.add(metrics.HTTP2_STREAMS, lambda: listener.open_streams)
    registry.add(metrics.REQUESTS_UNDER_WAY, lambda: listener.active_requests)
    registry.add(metrics.REQUESTS_HELD_BYTES, lambda: listener.reserved_bytes)
    registry.add(metrics.REQUESTS_ROOM_BYTES, lambda: listener.limits.requests_bytes)
    health = forwarder.health
    registry.add(
        metrics.UPSTREAM_TROUBLE,
        lambda: [({"kind": "refused"}, health.has_refused_credentials), ({"kind": "away"}, health.unreachable_count)],
    )
    registry.add(
        metrics.UPSTREAM_CONNECTIONS,
        lambda: [({"state": state}, n) for state, n in zip(("busy", "idle"), forwarder.connection_counts, strict=True)],
    )


def _register_request_metrics(registry: MetricsRegistry, request_stats: RequestStats) -> None:
    def requests() -> Samples:
        for stats in request_stats.operations:
            labels = {"operation": stats.operation, "label": stats.label}
            for status, count in zip(STATUSES, stats.responses_by_status, strict=True):
                if count:
                    yield {**labels, "status": status}, count

    registry.add(metrics.REQUESTS, requests)
    registry.add(
        metrics.REQUEST_DURATION_SECONDS,
        lambda: [
            ({"operation": stats.operation, "label": stats.label}, stats.durations)
            for stats in request_stats.measured_operations
        ],
    )
    registry.add(
        metrics.TIME_TO_FIRST_BYTE_SECONDS,
        lambda: [
            ({"operation": stats.operation, "label": stats.label}, stats.times_to_first_byte)
            for stats in request_stats.measured_operations
            if stats.is_streamed
        ],
    )
    registry.add(
        metrics.ADDED_LATENCY_SECONDS,
        lambda: [({"operation": operation}, latencies) for operation, latencies in request_stats.sum_added_latencies()],
    )
    registry.add(metrics.REFUSALS, lambda: [({"kind": kind}, n) for kind, n in request_stats.refusals_by_kind.items()])
