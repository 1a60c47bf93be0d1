"""The configuration as it stands in config.yaml: every key, its default and what it may be.

The defaults are here and nowhere else. A secret is never a value here, only the name of the environment variable
or of the file that holds it. The rules between the keys of a section stand before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Literal

from price_keeper.config import checks as must_be
from price_keeper.config.alerts import AlertsConfig
from price_keeper.config.checks import Address
from price_keeper.config.encryption import endpoint_is_encrypted, find_insecure_variables

# Prices are keys as well; they fill a file of their own.
from price_keeper.config.prices import DEMO_LABELS as DEMO_LABELS
from price_keeper.config.prices import PSEUDO_LABELS, GuardrailsConfig, find_missing_cache_prices
from price_keeper.config.prices import EndpointConfig as EndpointConfig
from price_keeper.config.prices import Format as Format
from price_keeper.config.prices import LabelConfig as LabelConfig
from price_keeper.config.prices import PicoPrices as PicoPrices
from price_keeper.config.prices import PricesConfig as PricesConfig
from price_keeper.config.prices import Tier as Tier
from price_keeper.config.prices import TierPrices as TierPrices
from price_keeper.config.reader import RuleViolation, constraints, read_file, read_text
from price_keeper.config.reader import read_config_file as read_config_file
from price_keeper.config.telemetry import TelemetryConfig
from price_keeper.errors import ConfigError

ENV_PREFIX = "PRICE_KEEPER__"


def load_config(path: Path, environ: Mapping[str, str]) -> Config:
    """Raises ConfigError with every mistake of the file and of the variables that override it."""
    return _require_safe_variables(read_file(Config, path, environ, ENV_PREFIX), environ)


def parse_config(text: str, source: str, environ: Mapping[str, str]) -> Config:
    """As load, from a text that problems call `source`."""
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
    # For all requests under way at once. Unless it is said, half of what the container may have; 256 without a limit.
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
    """Whom a sidecar that asks for no tokens spends for."""

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
    """A key that signs or verifies tokens. With its public half alone a sidecar verifies and cannot mint."""

    rules = (exactly_one_fitting_source,)

    kid: str = field(metadata=constraints(must_be.name))
    alg: Literal["HS256", "EdDSA", "RS256"]
    secret_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    secret_file: str | None = field(default=None, metadata=constraints(must_be.path))
    private_key_env: str | None = field(default=None, metadata=constraints(must_be.variable))
    private_key_file: str | None = field(default=None, metadata=constraints(must_be.path))
    public_key_file: str | None = field(default=None, metadata=constraints(must_be.path))


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
        default=(KeyConfig("k1", "HS256", "PRICE_KEEPER_JWT_SECRET"),),
        metadata=constraints(must_be.not_empty("at least one key is needed")),
    )
    admin_api_key_env: str = field(default="PRICE_KEEPER_API_KEY", metadata=constraints(must_be.variable))
    admin_api_key_file: str | None = field(default=None, metadata=constraints(must_be.path))  # goes before the variable
    access_seconds: int = field(default=3600, metadata=constraints(must_be.between(1, 86_400)))
    refresh_seconds: int = field(default=7 * 86_400, metadata=constraints(must_be.between(1, 90 * 86_400)))
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
class DefaultsConfig:
    """What an org has that does not say otherwise."""

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
        reason = "the model may be one that reads and writes caches"
        yield from find_missing_cache_prices(("default_price",), default_price, reason)


def models_have_one_label(labels: Mapping[str, LabelConfig]) -> Iterator[RuleViolation]:
    first: dict[str, str] = {}
    for name, label in labels.items():
        if first.setdefault(label.model, name) != name:
            yield ("labels", name, "model"), f"the same model as labels.{first[label.model]}"


def labels_are_not_taken(labels: Mapping[str, LabelConfig]) -> Iterator[RuleViolation]:
    for name in labels:
        if name in PSEUDO_LABELS:
            yield ("labels", name), f"the name under which {PSEUDO_LABELS[name]} are counted"


def labels_are_no_models(labels: Mapping[str, LabelConfig]) -> Iterator[RuleViolation]:
    for name, label in labels.items():
        if label.model != name and label.model in labels:
            yield ("labels", name, "model"), "also the name of another label"


def _list_configured_services(config: Config) -> Iterator[tuple[str, str]]:
    """What is called at an address of botocore's, by its names, and the key that allows any address."""
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
        for service in ("STS", "SSO", "SSO_OIDC"):  # from which credentials come
            yield service, "upstream.allow_insecure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    rules = (
        identity_stays_on_loopback,
        metering_has_prices,
        models_have_one_label,
        labels_are_no_models,
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
    on_store_down: Literal["serve", "refuse"] = "serve"
    unknown_org: Literal["refuse", "meter"] = "refuse"
    unlabelled: Literal["reject", "meter"] = "reject"
    default_price: TierPrices | None = None
    guardrails: GuardrailsConfig | None = None  # without their prices, none is applied
    labels: Mapping[str, LabelConfig] = field(
        metadata=constraints(must_be.not_empty("at least one label is needed"), keys=must_be.label_name)
    )
    defaults: DefaultsConfig = DefaultsConfig()

    @classmethod
    def development(cls) -> Config:
        """What a laptop without an AWS account runs on."""
        return cls(upstream=UpstreamConfig(endpoint="simulated"), labels=DEMO_LABELS)
