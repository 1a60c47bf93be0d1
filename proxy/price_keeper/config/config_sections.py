"""Every key of config.yaml: its type, its default and its rules.

Each section is a dataclass and each key a field of the same name. Defaults are here and nowhere else.
`constraints(...)` checks one value; the class attribute `rules` checks the keys of a section against each other. A
secret is never a value here, only the name of the environment variable or file that holds it.

Prices are decimal US dollars; `pico_*` gives the same price in whole pico-dollars for one unit, which is how spend is
counted. A price that is None is unknown, not zero.

Start with `Config`, `load_config` and `parse_config`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from price_keeper.config import value_checks as must_be
from price_keeper.config.config_reader import RuleViolation, constraints, read_file, read_text
from price_keeper.config.config_reader import read_config_file as read_config_file
from price_keeper.config.value_checks import (
    Address,
    endpoint_is_encrypted,
    find_insecure_variables,
    pico_per_job,
    pico_per_token,
    pico_per_unit,
)
from price_keeper.errors import ConfigError
from price_keeper.price_dimensions import CACHE_NAMES

Format = Literal["anthropic", "nova", "titan", "llama", "mistral", "cohere", "ai21", "deepseek", "openai"]
Tier = Literal["flex", "priority", "reserved"]  # besides the default tier

MAX_OUTPUT_TOKENS = 10_000_000  # of one response: ten times the limit of any model

# Spend that belongs to no model is counted under reserved labels, which no model may have.
GUARDRAIL_LABEL = "guardrails"
ASYNC_JOB_LABEL = "async-jobs"
PSEUDO_LABELS: Mapping[str, str] = MappingProxyType({GUARDRAIL_LABEL: "guardrails", ASYNC_JOB_LABEL: "async jobs"})


class PicoPrices(NamedTuple):
    """Pico-dollars for one token; None means that the price is unknown, not zero."""

    input: int
    output: int
    cache_read: int | None
    cache_write_5m: int | None
    cache_write_1h: int | None


@dataclass(frozen=True, slots=True)
class TierPrices:
    """USD for a million tokens."""

    input: Decimal = field(metadata=constraints(must_be.price))
    output: Decimal = field(metadata=constraints(must_be.price))
    cache_read: Decimal | None = field(default=None, metadata=constraints(must_be.price))
    cache_write_5m: Decimal | None = field(default=None, metadata=constraints(must_be.price))
    cache_write_1h: Decimal | None = field(default=None, metadata=constraints(must_be.price))

    @property
    def pico_per_token(self) -> PicoPrices:
        cache = (getattr(self, name) for name in CACHE_NAMES)
        cache_pico = (None if price is None else pico_per_token(price) for price in cache)
        return PicoPrices(pico_per_token(self.input), pico_per_token(self.output), *cache_pico)


@dataclass(frozen=True, slots=True)
class LongContext(TierPrices):
    """The prices of a whole call whose input tokens, with cache reads and writes, exceed `above_input_tokens`."""

    above_input_tokens: int = field(kw_only=True, metadata=constraints(must_be.between(1000, 100_000_000)))


@dataclass(frozen=True, slots=True)
class PricesConfig(TierPrices):
    """The prices of the default tier, and those of the other tiers, the optimized latency mode and long contexts."""

    service_tiers: Mapping[Tier, TierPrices] = field(default_factory=lambda: MappingProxyType({}), kw_only=True)
    latency_optimized: TierPrices | None = field(default=None, kw_only=True)
    long_context: LongContext | None = field(default=None, kw_only=True)

    def iterate_tables(self) -> Iterator[tuple[tuple[str, ...], TierPrices]]:
        """Every table of prices with its path below this one."""
        yield (), self
        for tier, prices in self.service_tiers.items():
            yield ("service_tiers", tier), prices
        if self.latency_optimized is not None:
            yield ("latency_optimized",), self.latency_optimized
        if self.long_context is not None:
            yield ("long_context",), self.long_context


@dataclass(frozen=True, slots=True)
class UnitPrices:
    """USD for a thousand units of ApplyGuardrail's policies, and of InvokeGuardrailChecks' checks."""

    content: Decimal = field(metadata=constraints(must_be.unit_price))
    content_image: Decimal = field(metadata=constraints(must_be.unit_price))
    topic: Decimal = field(metadata=constraints(must_be.unit_price))
    sensitive_information: Decimal = field(metadata=constraints(must_be.unit_price))
    contextual_grounding: Decimal = field(metadata=constraints(must_be.unit_price))
    automated_reasoning: Decimal = field(metadata=constraints(must_be.unit_price))
    check_content_filter: Decimal = field(metadata=constraints(must_be.unit_price))
    check_prompt_attack: Decimal = field(metadata=constraints(must_be.unit_price))
    check_sensitive_information: Decimal = field(metadata=constraints(must_be.unit_price))
    word: Decimal = field(default=Decimal(0), metadata=constraints(must_be.unit_price))  # AWS does not charge for it


@dataclass(frozen=True, slots=True)
class GuardrailsConfig:
    prices_usd_per_1000_units: UnitPrices

    def pico_per_unit(self, policy: str) -> int:
        return pico_per_unit(getattr(self.prices_usd_per_1000_units, policy))


@dataclass(frozen=True, slots=True)
class EndpointConfig:
    """One Bedrock endpoint that serves a label. Missing keys are inherited from the label, then from `upstream`."""

    rules = (endpoint_is_encrypted,)

    region: str = field(metadata=constraints(must_be.region))
    model: str | None = field(default=None, metadata=constraints(must_be.model))
    endpoint: str | None = field(default=None, metadata=constraints(must_be.url, private=True))
    prices_usd_per_1m: PricesConfig | None = None
    allow_insecure: bool = False


def endpoints_have_one_price(model: str, endpoints: tuple[EndpointConfig, ...]) -> Iterator[RuleViolation]:
    first: dict[tuple[str, str], int] = {}
    for number, endpoint in enumerate(endpoints):
        earlier = first.setdefault((endpoint.region, endpoint.model or model), number)
        if endpoint.prices_usd_per_1m != endpoints[earlier].prices_usd_per_1m:
            complaint = f"not those of endpoints.{earlier}, which is the same model in the same region"
            yield ("endpoints", str(number), "prices_usd_per_1m"), complaint


def aliases_are_names(model: str, aliases: tuple[str, ...]) -> Iterator[RuleViolation]:
    for number, alias in enumerate(aliases):
        complaint = must_be.alias(alias)
        if complaint is None and alias in (model, *aliases[:number]):
            complaint = "the label's own model" if alias == model else f"the same as aliases.{aliases.index(alias)}"
        if complaint is not None:
            yield ("aliases", str(number)), complaint


@dataclass(frozen=True, slots=True)
class LabelConfig:
    rules = (endpoints_have_one_price, aliases_are_names)

    model: str = field(metadata=constraints(must_be.model))
    format: Format
    prices_usd_per_1m: PricesConfig
    price_source: Literal["aws", "config"] = "aws"
    endpoints: tuple[EndpointConfig, ...] = ()  # tried in this order; default: the upstream's
    # USD for one unit that no count of tokens expresses: an image, a second of video, a search.
    prices_usd_per_unit: Mapping[str, Decimal] = field(
        default_factory=lambda: MappingProxyType({}),
        metadata=constraints(must_be.prices_of_units, keys=must_be.unit_dimension),
    )
    price_usd_per_async_job: Decimal | None = field(default=None, metadata=constraints(must_be.job_price))
    # Added to requests under hard budgets that set no maximum of output tokens; without it such requests are refused.
    max_output_tokens: int | None = field(default=None, metadata=constraints(must_be.between(1, MAX_OUTPUT_TOKENS)))
    aliases: tuple[str, ...] = ()  # further names by which apps may call the label, beside its own and its model's

    def prices_at(self, endpoint: EndpointConfig) -> PricesConfig:
        return endpoint.prices_usd_per_1m or self.prices_usd_per_1m

    @property
    def model_names(self) -> tuple[str, ...]:
        """What stands for the label in a request beside its own name, each in any form of a model's id."""
        return self.model, *self.aliases

    @property
    def pico_per_unit(self) -> Mapping[str, int]:
        return MappingProxyType({name: pico_per_job(usd) for name, usd in self.prices_usd_per_unit.items()})

    @property
    def pico_per_async_job(self) -> int | None:
        """The price of one job. None means that it is unknown, so jobs are refused."""
        return None if self.price_usd_per_async_job is None else pico_per_job(self.price_usd_per_async_job)


def _build_demo_label(model: str, format: Format, *usd_per_1m: str) -> LabelConfig:
    return LabelConfig(model, format, PricesConfig(*(Decimal(usd) for usd in usd_per_1m)))


# On demand these Claude models need an inference profile, whose prices these are.
DEMO_LABELS: Mapping[str, LabelConfig] = MappingProxyType(
    {
        "premium": _build_demo_label(
            "global.anthropic.claude-sonnet-4-5-20250929-v1:0", "anthropic", "3.00", "15.00", "0.30", "3.75", "6.00"
        ),
        "standard": _build_demo_label(
            "global.anthropic.claude-haiku-4-5-20251001-v1:0", "anthropic", "1.00", "5.00", "0.10", "1.25", "2.00"
        ),
        "economy": _build_demo_label("amazon.nova-lite-v1:0", "nova", "0.06", "0.24", "0.015", "0"),
    }
)


MAX_THRESHOLDS = 20  # each one adds a marker in the store for every label and day
MAX_THRESHOLD_PCT = 999  # as wide as a marker's key

_WEBHOOK_URL = re.compile(r"(?P<origin>https://[^/?#@\\\s]+)(?P<rest>[/?][!\"$-~]*)?", re.ASCII)
_MAX_WEBHOOK_URL = 2048


def _check_thresholds(thresholds: tuple[int, ...]) -> str | None:
    if len(thresholds) > MAX_THRESHOLDS:
        return f"expected at most {MAX_THRESHOLDS} thresholds"
    if any(not 1 <= pct <= MAX_THRESHOLD_PCT for pct in thresholds):
        return f"expected percentages of 1 to {MAX_THRESHOLD_PCT}"
    return None if len(set(thresholds)) == len(thresholds) else "expected each threshold once"


def _check_webhook_url(text: str) -> str | None:
    match = _WEBHOOK_URL.fullmatch(text) if len(text) <= _MAX_WEBHOOK_URL else None
    if match is None or must_be.url(match["origin"]) is not None:
        return "expected https://host[:port][/path][?query], without a user or a fragment"
    return None


def exactly_one_secret(secret_env: str | None, secret_file: str | None) -> Iterator[RuleViolation]:
    if (secret_env is None) is (secret_file is None):
        found = "none" if secret_env is None else "both"
        yield (), f"exactly one of secret_env and secret_file is needed, found {found}"


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """The receiver of alerts. Each request is signed with the secret, so that the receiver can authenticate it."""

    rules = (exactly_one_secret,)

    # For many receivers the URL itself is the credential, so no message shows it.
    url: str = field(repr=False, metadata=constraints(_check_webhook_url, private=True))
    secret_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    secret_file: str | None = field(default=None, metadata=constraints(must_be.path))


@dataclass(frozen=True, slots=True)
class AlertsConfig:
    thresholds_pct: tuple[int, ...] = field(default=(50, 80, 95, 100), metadata=constraints(_check_thresholds))
    webhook: WebhookConfig | None = None


_COLLECTOR_URL = re.compile(r"(?P<origin>https?://[^/?#@\\\s]+)(?P<path>(?:/[A-Za-z0-9._~-]+)*)/?", re.ASCII)
_MAX_COLLECTOR_URL = 2048


def _check_collector(text: str) -> str | None:
    match = _COLLECTOR_URL.fullmatch(text) if len(text) <= _MAX_COLLECTOR_URL else None
    if match is None or must_be.url(match["origin"]) is not None:
        return "expected http(s)://host[:port][/path] of an OTLP receiver, without a user, a query or a fragment"
    if match["path"].endswith("/v1/traces"):
        return "expected the address without /v1/traces at its end, which is added to it"
    return None


def _check_ratio(number: float) -> str | None:
    return None if 0 <= number <= 1 else "expected 0 to 1"


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    otlp_endpoint: str | None = field(default=None, metadata=constraints(_check_collector, private=True))
    sample_ratio: float = field(default=1.0, metadata=constraints(_check_ratio))
    logs: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"


ENV_PREFIX = "PRICE_KEEPER__"


def load_config(path: Path, environ: Mapping[str, str]) -> Config:
    """Read a configuration. Raises ConfigError with every mistake of the file and of the variables that override it."""
    return _require_safe_variables(read_file(Config, path, environ, ENV_PREFIX), environ)


def parse_config(text: str, source: str, environ: Mapping[str, str]) -> Config:
    """Like `load_config`, from a text that problems call `source`."""
    return _require_safe_variables(read_text(Config, text, source, environ, ENV_PREFIX), environ)


def _require_safe_variables(config: Config, environ: Mapping[str, str]) -> Config:
    if problems := find_insecure_variables(_list_configured_services(config), environ):
        raise ConfigError(problems)
    return config


def listeners_differ(data: Address, control: Address, health: Address | None) -> Iterator[RuleViolation]:
    used_by = {data: "data"}
    for name, address in (("control", control), ("health", health)):
        if address is not None and address.port and address in used_by:
            yield (name,), f"the same address as listen.{used_by[address]}"
        elif address is not None:
            used_by[address] = name


@dataclass(frozen=True, slots=True)
class TlsConfig:
    certificate_file: str = field(metadata=constraints(must_be.path))
    key_file: str = field(metadata=constraints(must_be.path))


@dataclass(frozen=True, slots=True)
class ListenConfig:
    rules = (listeners_differ,)

    data: Address = field(default=Address("127.0.0.1", 8080))
    control: Address = field(default=Address("127.0.0.1", 8081))
    health: Address | None = None
    tls: TlsConfig | None = None  # of the data port
    # For all concurrent requests. The default is half of the container's memory limit; 256 without a limit.
    request_memory_mib: int | None = field(default=None, metadata=constraints(must_be.between(32, 1_048_576)))


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    rules = (endpoint_is_encrypted,)

    endpoint: str | None = field(default=None, metadata=constraints(must_be.upstream_endpoint, private=True))
    region: str = field(default="us-east-1", metadata=constraints(must_be.region))
    auth: Literal["sigv4", "bearer"] = "sigv4"
    request_metadata: bool = False
    allow_insecure: bool = False


@dataclass(frozen=True, slots=True)
class StoreConfig:
    rules = (endpoint_is_encrypted,)

    engine: Literal["sqlite", "dynamodb"] = "sqlite"
    path: str = field(default="./data/price-keeper.db", metadata=constraints(must_be.path))
    endpoint: str | None = field(default=None, metadata=constraints(must_be.url, private=True))
    region: str = field(default="us-east-1", metadata=constraints(must_be.region))
    table_prefix: str = field(default="price-keeper-", metadata=constraints(must_be.table_prefix))
    allow_insecure: bool = False


def flush_interval_can_grow(flush_interval_secs: float, flush_interval_max_secs: float) -> Iterator[RuleViolation]:
    if flush_interval_max_secs < flush_interval_secs:
        yield ("flush_interval_max_secs",), f"less than flush_interval_secs, which is {flush_interval_secs:g}"


@dataclass(frozen=True, slots=True)
class JournalConfig:
    rules = (flush_interval_can_grow,)

    dir: str = field(default="./data/journal", metadata=constraints(must_be.path))
    flush_interval_secs: float = field(default=1.0, metadata=constraints(must_be.seconds))
    flush_interval_max_secs: float = field(default=15.0, metadata=constraints(must_be.seconds))
    fsync_interval_ms: int = field(default=50, metadata=constraints(must_be.between(1, 60_000)))
    max_unflushed_usd: Decimal = field(default=Decimal(100), metadata=constraints(must_be.positive))


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    interval_secs: float = field(default=60.0, metadata=constraints(must_be.seconds))


@dataclass(frozen=True, slots=True)
class IdentityConfig:
    """The org and app that a sidecar without authentication spends for."""

    org: str = field(metadata=constraints(must_be.org_id))
    app: str = field(metadata=constraints(must_be.app_id))


_SYMMETRIC_SOURCES = ("secret_env", "secret_file")
_ASYMMETRIC_SOURCES = ("private_key_env", "private_key_file", "public_key_file")


def exactly_one_fitting_source(
    alg: str,
    secret_env: str | None,
    secret_file: str | None,
    private_key_env: str | None,
    private_key_file: str | None,
    public_key_file: str | None,
) -> Iterator[RuleViolation]:
    values = (secret_env, secret_file, private_key_env, private_key_file, public_key_file)
    present = [
        name for name, value in zip(_SYMMETRIC_SOURCES + _ASYMMETRIC_SOURCES, values, strict=True) if value is not None
    ]
    suitable = _SYMMETRIC_SOURCES if alg == "HS256" else _ASYMMETRIC_SOURCES
    unsuitable = [name for name in present if name not in suitable]
    for name in unsuitable:
        yield (name,), f"not for {alg}, whose key comes from {' or '.join(suitable)}"
    if not unsuitable and len(present) != 1:
        yield (), f"exactly one of {', '.join(suitable)} is needed, found {' and '.join(present) or 'none'}"


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """A key that signs or verifies tokens. With only its public half a sidecar can verify tokens but not mint them."""

    rules = (exactly_one_fitting_source,)

    kid: str = field(metadata=constraints(must_be.name))
    alg: Literal["HS256", "EdDSA", "RS256"]
    secret_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    secret_file: str | None = field(default=None, metadata=constraints(must_be.path))
    private_key_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    private_key_file: str | None = field(default=None, metadata=constraints(must_be.path))
    public_key_file: str | None = field(default=None, metadata=constraints(must_be.path))


DEFAULT_KEYS = (KeyConfig("k1", "HS256", "PRICE_KEEPER_JWT_SECRET"),)


def identity_goes_with_its_mode(mode: str, identity: IdentityConfig | None) -> Iterator[RuleViolation]:
    if mode == "identity" and identity is None:
        yield ("identity",), "required with mode: identity"
    if mode != "identity" and identity is not None:
        yield ("identity",), "only allowed with mode: identity"


def kids_differ(keys: tuple[KeyConfig, ...]) -> Iterator[RuleViolation]:
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        if first.setdefault(key.kid, index) != index:
            yield ("keys", str(index), "kid"), f"the same as auth.keys.{first[key.kid]}.kid"


def sessions_outlive_tokens(access_seconds: int, refresh_seconds: int) -> Iterator[RuleViolation]:
    if refresh_seconds < access_seconds:
        yield ("refresh_seconds",), f"less than access_seconds, which is {access_seconds}"


@dataclass(frozen=True, slots=True)
class AuthConfig:
    rules = (identity_goes_with_its_mode, kids_differ, sessions_outlive_tokens)

    mode: Literal["required", "identity"] = "required"
    identity: IdentityConfig | None = None
    issuer: str = field(default="price-keeper", metadata=constraints(must_be.name))
    keys: tuple[KeyConfig, ...] = field(
        default=DEFAULT_KEYS,
        metadata=constraints(must_be.not_empty("at least one key is needed")),
    )
    admin_api_key_env: str = field(default="PRICE_KEEPER_API_KEY", metadata=constraints(must_be.variable))
    # It has precedence over the variable.
    admin_api_key_file: str | None = field(default=None, metadata=constraints(must_be.path))
    access_seconds: int = field(default=3600, metadata=constraints(must_be.between(1, 86_400)))
    refresh_seconds: int = field(default=30 * 86_400, metadata=constraints(must_be.between(1, 90 * 86_400)))
    revocation_grace_seconds: int = field(default=600, metadata=constraints(must_be.between(0, 86_400)))
    control_url: str | None = field(
        default=None, metadata=constraints(must_be.control_url)
    )  # for sidecars that cannot mint
    max_sessions: int = field(default=5, metadata=constraints(must_be.at_least(0)))  # 0 is unlimited


def refresh_quickens_when_tight(
    refresh_interval_normal_secs: int, refresh_interval_tight_secs: int
) -> Iterator[RuleViolation]:
    if refresh_interval_tight_secs > refresh_interval_normal_secs:
        normal = f"refresh_interval_normal_secs, which is {refresh_interval_normal_secs}"
        yield ("refresh_interval_tight_secs",), f"more than {normal}"


@dataclass(frozen=True, slots=True)
class ControlApiConfig:
    """The rate limit of each client of the control API. A batch of usage is one request with up to 100 submissions, so
    the default rate allows a client 6,000 of them a second."""

    burst_requests: int = field(default=200, metadata=constraints(must_be.between(1, 1_000_000)))
    requests_per_second: int = field(default=60, metadata=constraints(must_be.between(1, 100_000)))


@dataclass(frozen=True, slots=True)
class DefaultsConfig:
    """The settings of orgs that do not set their own."""

    rules = (refresh_quickens_when_tight,)

    tight_mode_threshold_pct: int = field(default=95, metadata=constraints(must_be.between(1, 100)))
    refresh_interval_normal_secs: int = field(default=300, metadata=constraints(must_be.seconds))
    refresh_interval_tight_secs: int = field(default=60, metadata=constraints(must_be.seconds))
    agg_shard_count: Literal[8, 16, 32, 64] = 8
    timezone: str = field(default="UTC", metadata=constraints(must_be.time_zone))


def identity_stays_on_loopback(listen: ListenConfig, auth: AuthConfig) -> Iterator[RuleViolation]:
    if auth.mode == "identity" and not listen.data.is_loopback:
        yield ("listen", "data"), "must be loopback with auth.mode: identity, where any caller can spend"


def metering_has_prices(unlabelled: str, default_price: TierPrices | None) -> Iterator[RuleViolation]:
    if unlabelled == "meter" and default_price is None:
        yield ("default_price",), "required with unlabelled: meter"
    if default_price is not None:
        for name in CACHE_NAMES:
            if getattr(default_price, name) is None:
                why = "the model may be one that reads and writes caches"
                yield ("default_price", name), f"required, but missing: {why}"


def names_mean_one_label(labels: Mapping[str, LabelConfig]) -> Iterator[RuleViolation]:
    """No id, as it is written, stands for two labels."""
    first: dict[str, tuple[str, str]] = {}
    for name, label in labels.items():
        for number, given in enumerate(label.model_names):
            path = ("aliases", str(number - 1)) if number else ("model",)
            if given != name and given in labels:
                yield ("labels", name, *path), f"also the name of another label: {given}"
            owner, key = first.setdefault(given, (name, path[0]))
            if owner != name:
                what = f"the same model as labels.{owner}" if key == "model" else f"also an alias of labels.{owner}"
                yield ("labels", name, *path), what


def labels_are_not_taken(labels: Mapping[str, LabelConfig]) -> Iterator[RuleViolation]:
    for name in labels:
        if name in PSEUDO_LABELS:
            yield ("labels", name), f"the name under which {PSEUDO_LABELS[name]} are counted"


def _list_configured_services(config: Config) -> Iterator[tuple[str, str]]:
    """The AWS services that are called at botocore's addresses, each with the key that allows an insecure address."""
    store, upstream = config.store, config.upstream
    is_on_dynamodb, is_simulated = store.engine == "dynamodb", upstream.endpoint == "simulated"
    follows_prices = not is_simulated and any(label.price_source == "aws" for label in config.labels.values())
    if is_on_dynamodb and store.endpoint is None and not store.allow_insecure:
        yield "DYNAMODB", "store.allow_insecure"
    if upstream.allow_insecure:
        return
    if follows_prices:
        yield "PRICING", "upstream.allow_insecure"
    if is_on_dynamodb or follows_prices or not (is_simulated or upstream.auth == "bearer"):
        for service in ("STS", "SSO", "SSO_OIDC"):  # they issue credentials
            yield service, "upstream.allow_insecure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    rules = (
        identity_stays_on_loopback,
        metering_has_prices,
        names_mean_one_label,
        labels_are_not_taken,
    )

    listen: ListenConfig = ListenConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    store: StoreConfig = StoreConfig()
    journal: JournalConfig = JournalConfig()
    aggregator: AggregatorConfig = AggregatorConfig()
    alerts: AlertsConfig = field(default=AlertsConfig())
    telemetry: TelemetryConfig = field(default=TelemetryConfig())
    auth: AuthConfig = AuthConfig()
    control_api: ControlApiConfig = ControlApiConfig()
    on_store_down: Literal["serve", "refuse"] = "serve"
    unknown_org: Literal["refuse", "meter"] = "refuse"
    unlabelled: Literal["reject", "meter"] = "reject"
    default_price: TierPrices | None = None
    guardrails: GuardrailsConfig | None = None  # without prices, requests with guardrails are refused
    labels: Mapping[str, LabelConfig] = field(
        metadata=constraints(must_be.not_empty("at least one label is needed"), keys=must_be.label_name)
    )
    defaults: DefaultsConfig = DefaultsConfig()

    @classmethod
    def development(cls) -> Config:
        """A configuration for a laptop without an AWS account."""
        return cls(upstream=UpstreamConfig(endpoint="simulated"), labels=DEMO_LABELS)
