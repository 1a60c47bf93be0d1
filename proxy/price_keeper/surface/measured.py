"""What `/metrics` tells of the data port, from those who know it."""

from __future__ import annotations

from price_keeper import telemetry as metrics
from price_keeper.forwarding.forwarder import Forwarder
from price_keeper.forwarding.joining import Joining
from price_keeper.surface.listener import Listener
from price_keeper.telemetry import Samples, Telemetry
from price_keeper.traffic import STATUSES, RequestStats

_PROTOCOLS = ("http/1.1", "h2", "unknown")


def add_to(telemetry: Telemetry, traffic: RequestStats, joining: Joining, listener: Listener, forwarder: Forwarder) -> None:
    _add_answers(telemetry, traffic)
    telemetry.add(metrics.JOINED_RETRIES, lambda: joining.joined)
    telemetry.add(
        metrics.CONNECTIONS,
        lambda: [({"protocol": protocol}, listener.connections[protocol]) for protocol in _PROTOCOLS],
    )
    telemetry.add(metrics.STREAMS, lambda: listener.open_streams)
    telemetry.add(metrics.UNDER_WAY, lambda: listener.active_requests)
    telemetry.add(metrics.HELD_BYTES, lambda: listener.reserved_bytes)
    telemetry.add(metrics.ROOM_BYTES, lambda: listener.limits.requests_bytes)
    reach = forwarder.reach
    telemetry.add(
        metrics.UPSTREAM_TROUBLE,
        lambda: [({"kind": "refused"}, reach.is_refused), ({"kind": "away"}, reach.places_away)],
    )
    telemetry.add(
        metrics.UPSTREAM,
        lambda: [({"state": state}, n) for state, n in zip(("busy", "idle"), forwarder.connections, strict=True)],
    )


def _add_answers(telemetry: Telemetry, traffic: RequestStats) -> None:
    def requests() -> Samples:
        for lane in traffic.operations:
            named = {"operation": lane.operation, "label": lane.label}
            for status, count in zip(STATUSES, lane.responses_by_status, strict=True):
                if count:
                    yield {**named, "status": status}, count

    telemetry.add(metrics.REQUESTS, requests)
    telemetry.add(
        metrics.REQUEST_SECONDS,
        lambda: [({"operation": each.operation, "label": each.label}, each.durations) for each in traffic.measured_operations],
    )
    telemetry.add(
        metrics.FIRST_BYTE_SECONDS,
        lambda: [
            ({"operation": each.operation, "label": each.label}, each.times_to_first_byte)
            for each in traffic.measured_operations
            if each.is_streamed
        ],
    )
    telemetry.add(
        metrics.ADDED_SECONDS,
        lambda: [({"operation": operation}, found) for operation, found in traffic.sum_added_latencies()],
    )
    telemetry.add(metrics.REFUSALS, lambda: [({"kind": kind}, n) for kind, n in traffic.refusals_by_kind.items()])
