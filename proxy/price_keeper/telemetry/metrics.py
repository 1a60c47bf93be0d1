"""Every metric of the product, and the registry that renders them for Prometheus.

Nothing is counted here: when /metrics is requested, each metric is read from the component that owns it. Each constant
is named like the public name of its metric. Start with the constants, then `MetricsRegistry`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from price_keeper.telemetry.request_stats import Distribution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = "Iterable[tuple[Labels, float | Distribution]]"
MetricValue: TypeAlias = "float | Samples"
MetricKind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: MetricKind
    help: str


def _metric(name: str, kind: MetricKind, help: str) -> Metric:
    return Metric(f"price_keeper_{name}", kind, help)


# ---------------------------------------------------------------- this process

BUILD_INFO = _metric("build_info", "gauge", "1; which version this is, compiled or not, and which Python runs it")
WORKERS = _metric("workers", "gauge", "worker processes that are configured to share the data port")
WORKERS_UP = _metric("workers_up", "gauge", "worker processes that responded to this scrape")

RELOADS = _metric("reloads_total", "counter", "reloads of the configuration, by result")
CONFIGURATION_REFUSED = _metric(
    "configuration_refused", "gauge", "1 while the last reload is rejected and an older configuration is in force"
)
CONFIGURATION_TAKEN_TIMESTAMP = _metric(
    "configuration_taken_timestamp_seconds", "gauge", "when the configuration in force was applied"
)

# ---------------------------------------------------------------- the data port

REQUESTS = _metric("requests_total", "counter", "requests answered, by operation, label and class of status")
REQUEST_DURATION_SECONDS = _metric(
    "request_duration_seconds",
    "histogram",
    "from the complete request to the last byte of Bedrock's response passed on",
)
TIME_TO_FIRST_BYTE_SECONDS = _metric(
    "time_to_first_byte_seconds", "histogram", "from the complete request to the first byte of a streamed response"
)
ADDED_LATENCY_SECONDS = _metric(
    "added_latency_seconds",
    "histogram",
    "time spent in the proxy: before a call is sent, and after its response's last byte arrived",
)
REFUSALS = _metric("refusals_total", "counter", "requests that the proxy itself refused, by kind")
JOINED_RETRIES = _metric("joined_retries_total", "counter", "SDK retries that joined the call they repeat")
CONNECTIONS = _metric("connections", "gauge", "client connections, by protocol; unknown until their first bytes")
HTTP2_STREAMS = _metric("http2_streams", "gauge", "open HTTP/2 streams")
REQUESTS_UNDER_WAY = _metric(
    "requests_under_way", "gauge", "active requests, including those whose client has disconnected"
)
REQUESTS_HELD_BYTES = _metric("requests_held_bytes", "gauge", "memory reserved for requests being received or active")
REQUESTS_ROOM_BYTES = _metric("requests_room_bytes", "gauge", "limit of that memory; further requests are refused")
UPSTREAM_CONNECTIONS = _metric("upstream_connections", "gauge", "connections to Bedrock, by whether they carry a call")
UPSTREAM_TROUBLE = _metric(
    "upstream_trouble", "gauge", "problems with Bedrock: rejected credentials, unreachable endpoints"
)

# ---------------------------------------------------------------- what was used, and its way to the store

RECORDED_REQUESTS = _metric("recorded_requests_total", "counter", "calls recorded, by whether their usage is estimated")
RECORDED_USD = _metric("recorded_usd_total", "counter", "US dollars recorded since the start of the process")
TOKENS = _metric("tokens_total", "counter", "tokens recorded since the start of the process, by what they cost as")
PIECES = _metric(
    "units_total", "counter", "what is sold by the piece, recorded since the start of the process, by type"
)
GUARDRAIL_UNITS = _metric("guardrail_units_total", "counter", "units of guardrails recorded since the start")
CALLS_OPEN = _metric("calls_open", "gauge", "calls sent to Bedrock whose usage is not known yet")
UNFLUSHED_USD = _metric("unflushed_usd", "gauge", "US dollars in the journal that are not in the store")
UNFLUSHED_LIMIT_USD = _metric(
    "unflushed_limit_usd", "gauge", "limit of unflushed US dollars; beyond it calls are refused"
)
UNFLUSHED_SECONDS = _metric("unflushed_seconds", "gauge", "age of the oldest journal entry that is not in the store")
STORE_TROUBLE = _metric("store_trouble", "gauge", "1 while the last flush to the store has failed")
JOURNAL_TROUBLE = _metric(
    "journal_trouble", "gauge", "1 while the journal's disk fails a write, a new segment or a sync"
)
JOURNAL_SEGMENTS_WAITING = _metric("journal_segments_waiting", "gauge", "sealed segments that are not in the store")
JOURNAL_TORN_LINES = _metric(
    "journal_torn_lines_total", "counter", "truncated or corrupt journal lines, found when the process started"
)
JOURNAL_ESTIMATED_CALLS = _metric(
    "journal_lost_calls_total",  # the older name
    "counter",
    "calls whose end a former process did not record, counted with estimated usage; none of them is lost",
)
JOURNAL_UNRECOVERABLE_CALLS = _metric(
    "journal_unrecoverable_calls_total",
    "counter",
    "calls that were carried into a segment and whose lines are corrupt: not counted, their spend is missing",
)
FLUSHES = _metric("flushes_total", "counter", "segments flushed to the store")
FLUSH_REPEATS = _metric("flush_repeats_total", "counter", "parts of segments that were in the store already")
FLUSH_REJECTS = _metric("flush_rejects_total", "counter", "segments that the store rejects for good; see the log")
TOTALS_WRITTEN = _metric("totals_written_total", "counter", "totals that this process updated")
TOTALS_LEFT_ALONE = _metric(
    "totals_left_alone_total", "counter", "totals not computed again: updated a moment ago by any process"
)
TOTALS_LAG_SECONDS = _metric(
    "totals_lag_seconds",
    "histogram",
    "from the acknowledgement of a flush to the total that includes it, of flushes of this process",
)
TOTALS_AGE_SECONDS = _metric(
    "totals_age_seconds", "gauge", "time since this process last had all its totals that were due up to date"
)

# ---------------------------------------------------------------- prices

PRICE_SOURCE_INFO = _metric("price_source_info", "gauge", "1; source of a label's prices at an endpoint")
PRICE_AGE_SECONDS = _metric(
    "price_age_seconds", "gauge", "time since the AWS Price List was read for a label's endpoint"
)
PRICE_TROUBLE = _metric("price_trouble", "gauge", "1 if a label's prices are not current")

# ---------------------------------------------------------------- budgets

QUOTA_USED_RATIO = _metric(
    "quota_used_ratio", "gauge", "spent share of a label's quota, for the scopes that have used most of it"
)
QUOTA_MODE = _metric("quota_mode", "gauge", "mode of the same quotas: 0 normal, 1 tight, 2 exceeded")
ACTIVE_LABEL_INFO = _metric("active_label_info", "gauge", "1; active label of the same scopes")
SCOPES = _metric("scopes", "gauge", "orgs and apps whose budgets are held in memory")
SCOPES_UNTOLD = _metric("scopes_untold", "gauge", "scopes without quota metrics, because there are too many scopes")
SCOPES_STALE = _metric("scopes_stale", "gauge", "scopes whose budget could not be refreshed in time")
UNKNOWN_ORGS_SERVED = _metric(
    "unknown_orgs_served_total", "counter", "orgs that began to be served without a budget, by reason"
)
BUDGET_LOOKS = _metric(
    "budget_looks_total", "counter", "reads of a scope's budget from the store, by whether they failed"
)
ACTIVE_LABEL_FLIPS = _metric(
    "active_label_flips_total", "counter", "changes of a scope's active label that this process saw"
)
BUDGET_MOVES = _metric(
    "budget_moves_total", "counter", "times that this process advanced an active label for the whole fleet"
)
SERVED_BY_ANOTHER_LABEL = _metric(
    "served_by_another_label_total", "counter", "calls served by another label than the requested one"
)
QUOTA_REFUSALS = _metric("quota_refusals_total", "counter", "calls refused because every quota that may pay is spent")
HARD_BUDGET_HELD_USD = _metric(
    "hard_budget_held_usd", "gauge", "US dollars leased from hard budgets and not spent by this process"
)
HARD_BUDGET_TOP_UPS = _metric(
    "hard_budget_top_ups_total", "counter", "times that this process leased more of a hard budget"
)
HARD_BUDGET_REFUSALS = _metric(
    "hard_budget_refusals_total", "counter", "calls whose cost ceiling could not be reserved"
)

# ---------------------------------------------------------------- limits

LIMITED_CALLS = _metric("limited_calls_total", "counter", "calls of callers with rate limits, by how they were decided")
LIMIT_WRITES = _metric("limit_writes_total", "counter", "requests to the store for more of a rate limit, by path")
LIMITS_GIVEN_BACK = _metric(
    "limits_given_back_total", "counter", "times that unused leased rate-limit tokens were returned"
)
LIMITS_UNASKED = _metric(
    "limits_unasked_total", "counter", "requests for more of a rate limit that failed, also by throttling or conflicts"
)
LEASES = _metric("leases", "gauge", "callers with a rate lease in this process")
LEASED = _metric("leased", "gauge", "rate-limit tokens leased by this process, by limit")

# ---------------------------------------------------------------- tokens and secrets

REVOCATION_LOOKUPS = _metric(
    "revocation_lookups_total",
    "counter",
    "lookups of tokens in the revocation list, by whether the cache had the result",
)
REVOCATIONS = _metric("revocations_total", "counter", "tokens and sessions that this process revoked")
REVOCATION_AWAY_SECONDS = _metric(
    "revocation_away_seconds", "gauge", "time since the revocation list could last be read from the store"
)
TOKENS_UNCHECKED = _metric(
    "tokens_unchecked_total", "counter", "tokens accepted by signature alone while the store was unreachable"
)
RETRIEVAL_TOKENS = _metric("retrieval_tokens_total", "counter", "retrieval tokens of secrets: made, used, refused")
RETRIEVAL_REFUSALS = _metric(
    "retrieval_tokens_refused_total", "counter", "refused retrieval tokens: expired, reused or unknown"
)

# ---------------------------------------------------------------- alerts and traces

ALERTS_RAISED = _metric("alerts_raised_total", "counter", "alerts that this process raised, by threshold in percent")
WEBHOOKS_DELIVERED = _metric("webhooks_delivered_total", "counter", "alerts that the webhook's receiver accepted")
WEBHOOKS_FAILED = _metric("webhooks_failed_total", "counter", "attempts that failed, by whether it was the last one")
WEBHOOKS_WAITING = _metric("webhooks_waiting", "gauge", "alerts waiting for delivery to the webhook")
SPANS = _metric("spans_total", "counter", "spans of sampled calls: made, exported, failed")

ALL_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class MetricsRegistry:
    """The metrics of a process, each with the function that reads its value or samples."""

    def __init__(self) -> None:
        self._metrics: list[tuple[Metric, Callable[[], MetricValue]]] = []

    def add(self, metric: Metric, read: Callable[[], MetricValue]) -> None:
        self._metrics.append((metric, read))

    def render_own(self) -> str:
        return "".join(
            format_metric_header(metric) + "".join(_format_samples(metric.name, read()))
            for metric, read in self._metrics
        )

    async def scrape(self) -> str:
        """The exposition text for Prometheus: of this process, and of the workers that it reports for."""
        return self.render_own()


def format_metric_header(metric: Metric) -> str:
    return f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"


def _format_samples(name: str, value_read: MetricValue) -> Iterable[str]:
    for labels, value in [({}, value_read)] if isinstance(value_read, (int, float)) else value_read:
        labels_text = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        if isinstance(value, Distribution):
            yield from _format_histogram(name, labels_text, value)
        else:
            yield _format_line(name, labels_text, value)


def _format_histogram(name: str, labels_text: str, distribution: Distribution) -> Iterable[str]:
    """The lines of a histogram. Prometheus buckets are cumulative; those of `Distribution` are not."""
    cumulative, before = 0, f"{labels_text}," if labels_text else ""
    for bound, count in zip((*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True):
        cumulative += count
        yield _format_line(f"{name}_bucket", f'{before}le="{bound}"', cumulative)
    yield _format_line(f"{name}_sum", labels_text, distribution.total)
    yield _format_line(f"{name}_count", labels_text, cumulative)


def _format_line(name: str, labels_text: str, value: float) -> str:
    return f"{name}{'{' + labels_text + '}' if labels_text else ''} {value:.17g}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
