"""Every metric of the product, and the registry that renders them for Prometheus.

Nothing is counted here: a metric is read from the component that owns it when /metrics is requested. Each constant
has the public name of its metric.
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
WORKERS = _metric("workers", "gauge", "processes that are to share the data port")
WORKERS_UP = _metric("workers_up", "gauge", "processes on the data port that told what they have counted")

RELOADS = _metric("reloads_total", "counter", "times that labels and prices were to be read again, by what came of it")
CONFIGURATION_REFUSED = _metric(
    "configuration_refused", "gauge", "1 while the configuration that was read last is not in force"
)
CONFIGURATION_TAKEN_TIMESTAMP = _metric(
    "configuration_taken_timestamp_seconds", "gauge", "when the one in force was taken on"
)

# ---------------------------------------------------------------- the data port

REQUESTS = _metric("requests_total", "counter", "requests answered, by operation, label and class of status")
REQUEST_DURATION_SECONDS = _metric(
    "request_duration_seconds", "histogram", "from a whole request to the last byte of Bedrock's answer handed on"
)
TIME_TO_FIRST_BYTE_SECONDS = _metric(
    "time_to_first_byte_seconds", "histogram", "from a whole request to the first byte of a streamed answer"
)
ADDED_LATENCY_SECONDS = _metric(
    "added_latency_seconds", "histogram", "our own time: before a call is sent, and after its answer's last byte came"
)
REFUSALS = _metric("refusals_total", "counter", "requests that were refused here, by kind")
JOINED_RETRIES = _metric("joined_retries_total", "counter", "repeats of SDKs that joined the call they repeat")
CONNECTIONS = _metric("connections", "gauge", "connections of callers, by protocol; unknown before their first bytes")
HTTP2_STREAMS = _metric("http2_streams", "gauge", "streams of HTTP/2 that are open")
REQUESTS_UNDER_WAY = _metric(
    "requests_under_way", "gauge", "requests that are handled, whether or not their callers still wait"
)
REQUESTS_HELD_BYTES = _metric(
    "requests_held_bytes", "gauge", "what the requests that come in or are under way hold of memory"
)
REQUESTS_ROOM_BYTES = _metric(
    "requests_room_bytes", "gauge", "how much memory those requests may hold; beyond it they are refused"
)
UPSTREAM_CONNECTIONS = _metric("upstream_connections", "gauge", "connections to Bedrock, by whether they carry a call")
UPSTREAM_TROUBLE = _metric(
    "upstream_trouble", "gauge", "what keeps calls from Bedrock: refused credentials, places away"
)

# ---------------------------------------------------------------- what was used, and its way to the store

RECORDED_REQUESTS = _metric("recorded_requests_total", "counter", "calls recorded, by whether their usage is estimated")
RECORDED_USD = _metric("recorded_usd_total", "counter", "US dollars recorded since the start of the process")
TOKENS = _metric("tokens_total", "counter", "tokens recorded since the start of the process, by what they cost as")
GUARDRAIL_UNITS = _metric("guardrail_units_total", "counter", "units of guardrails recorded since the start")
CALLS_OPEN = _metric("calls_open", "gauge", "calls sent to Bedrock whose usage is not known yet")
UNFLUSHED_USD = _metric("unflushed_usd", "gauge", "US dollars in the journal that are not in the store")
UNFLUSHED_LIMIT_USD = _metric("unflushed_limit_usd", "gauge", "how many may be there until calls are refused")
UNFLUSHED_SECONDS = _metric("unflushed_seconds", "gauge", "for how long something in the journal waits for the store")
STORE_TROUBLE = _metric("store_trouble", "gauge", "1 while the last flush to the store has failed")
JOURNAL_TROUBLE = _metric("journal_trouble", "gauge", "1 while the disk takes no lines, no new segment, or no sync")
JOURNAL_SEGMENTS_WAITING = _metric("journal_segments_waiting", "gauge", "sealed segments that are not in the store")
JOURNAL_TORN_LINES = _metric(
    "journal_torn_lines_total", "counter", "lines cut off or spoilt, found when the process started"
)
JOURNAL_LOST_CALLS = _metric(
    "journal_lost_calls_total", "counter", "calls under way at a crash, found at the start: estimated"
)
FLUSHES = _metric("flushes_total", "counter", "segments that went to the store")
FLUSH_REPEATS = _metric("flush_repeats_total", "counter", "parts of segments that were in the store already")
FLUSH_REJECTS = _metric("flush_rejects_total", "counter", "segments that the store will never take: see the log")
TOTALS_WRITTEN = _metric("totals_written_total", "counter", "totals that this process brought up to date")
TOTALS_LEFT_ALONE = _metric(
    "totals_left_alone_total", "counter", "totals that somebody else had just brought up to date"
)
TOTALS_AGE_SECONDS = _metric("totals_age_seconds", "gauge", "since this process was last through with all totals")

# ---------------------------------------------------------------- prices

PRICE_SOURCE_INFO = _metric("price_source_info", "gauge", "1; where a label's prices at a place come from")
PRICE_AGE_SECONDS = _metric("price_age_seconds", "gauge", "since the AWS Price List was read for a label's place")
PRICE_TROUBLE = _metric("price_trouble", "gauge", "1 where a label's prices are not those of today")

# ---------------------------------------------------------------- budgets

QUOTA_USED_RATIO = _metric(
    "quota_used_ratio", "gauge", "what is spent of a label's quota, of the scopes nearest to its end"
)
QUOTA_MODE = _metric("quota_mode", "gauge", "of the same: 0 normal, 1 tight, 2 exceeded")
ACTIVE_LABEL_INFO = _metric("active_label_info", "gauge", "1; which label of its chain is active, of the same scopes")
SCOPES = _metric("scopes", "gauge", "orgs and apps whose budgets are held in memory")
SCOPES_UNTOLD = _metric("scopes_untold", "gauge", "those of which no quota is told here, as there are too many")
SCOPES_STALE = _metric("scopes_stale", "gauge", "scopes whose budget could not be looked up when it was time to")
UNKNOWN_ORGS_SERVED = _metric(
    "unknown_orgs_served_total", "counter", "orgs that began to be served without a budget, by why nobody knows one"
)
BUDGET_LOOKS = _metric(
    "budget_looks_total", "counter", "looks at the store for a scope's budget, by whether they failed"
)
ACTIVE_LABEL_FLIPS = _metric(
    "active_label_flips_total", "counter", "times that a scope's active label became another, as seen here"
)
BUDGET_MOVES = _metric(
    "budget_moves_total", "counter", "times that this process moved an active label on for the whole fleet"
)
SERVED_BY_ANOTHER_LABEL = _metric(
    "served_by_another_label_total", "counter", "calls that another label served than was asked"
)
QUOTA_REFUSALS = _metric("quota_refusals_total", "counter", "calls refused because every quota that may pay is spent")
HARD_BUDGET_HELD_USD = _metric(
    "hard_budget_held_usd", "gauge", "US dollars of hard budgets that this process holds, and has not spent"
)
HARD_BUDGET_TOP_UPS = _metric(
    "hard_budget_top_ups_total", "counter", "times that this process took more of a hard budget"
)
HARD_BUDGET_REFUSALS = _metric(
    "hard_budget_refusals_total", "counter", "worst cases of calls that no hold could be had for"
)

# ---------------------------------------------------------------- limits

LIMITED_CALLS = _metric("limited_calls_total", "counter", "calls of callers who have limits, by how it was decided")
LIMIT_WRITES = _metric("limit_writes_total", "counter", "questions to the store for more of a limit, by the path taken")
LIMITS_GIVEN_BACK = _metric("limits_given_back_total", "counter", "times that what a caller does not need went back")
LIMITS_UNASKED = _metric("limits_unasked_total", "counter", "questions for more of a limit without an answer")
LEASES = _metric("leases", "gauge", "callers of whose limits something may be held here")
LEASED = _metric("leased", "gauge", "what is held here of limits, by limit")

# ---------------------------------------------------------------- tokens and secrets

REVOCATION_LOOKUPS = _metric(
    "revocation_lookups_total", "counter", "tokens looked up among the revoked ones, by whether that was known here"
)
REVOCATIONS = _metric("revocations_total", "counter", "tokens and sessions that were revoked here")
REVOCATION_AWAY_SECONDS = _metric(
    "revocation_away_seconds", "gauge", "for how long the store has not said what is revoked"
)
TOKENS_UNCHECKED = _metric(
    "tokens_unchecked_total", "counter", "tokens let in by signature alone, the store being away"
)
RETRIEVAL_TOKENS = _metric("retrieval_tokens_total", "counter", "retrieval tokens of secrets: made, used, refused")

# ---------------------------------------------------------------- alerts and traces

ALERTS_RAISED = _metric("alerts_raised_total", "counter", "alerts that this process raised, by threshold in percent")
WEBHOOKS_DELIVERED = _metric("webhooks_delivered_total", "counter", "alerts that the webhook's receiver has taken")
WEBHOOKS_FAILED = _metric("webhooks_failed_total", "counter", "attempts that failed, by whether it was the last one")
WEBHOOKS_WAITING = _metric("webhooks_waiting", "gauge", "alerts that the webhook's receiver has not taken yet")
SPANS = _metric("spans_total", "counter", "spans of sampled calls: made, exported, and those that could not be")

ALL_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class MetricsRegistry:
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
        """Of this process, and of those that it speaks for."""
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
    """Each bucket holds all that is in those below it."""
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
