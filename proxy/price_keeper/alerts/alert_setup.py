"""Build the alerts of one process from its configuration: secret, outbox, webhook, deliveries and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

from yarl import URL

from price_keeper.alerts.alert_delivery import AlertDeliveries
from price_keeper.alerts.alert_outbox import AlertOutbox
from price_keeper.alerts.alert_raiser import AlertRaiser
from price_keeper.alerts.webhook import WebhookSender, is_public_address
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.config.config_sections import WebhookConfig as WebhookConfig
from price_keeper.errors import ConfigError
from price_keeper.stores.contract import Store
from price_keeper.tasks import Tasks
from price_keeper.telemetry import metrics
from price_keeper.telemetry.metrics import MetricsRegistry

ALERTS_FOLDER = "alerts"  # in the journal's
MIN_WEBHOOK_SECRET_BYTES = 16  # bytes


@asynccontextmanager
async def open_alerts(
    config: Config, environ: Mapping[str, str], store: Store, clock: Clock, tasks: Tasks
) -> AsyncIterator[AlertRaiser]:
    """Open the alerts of a process. The caller must hold the lock of the journal's folder. Raises ConfigError."""
    webhook_config = config.alerts.webhook
    if webhook_config is None:
        yield _start(AlertRaiser(store, clock), tasks)
        return
    webhook = WebhookSender(webhook_config.url, load_checked_secret(webhook_config, environ), clock.now)
    outbox = AlertOutbox(Path(config.journal.dir) / ALERTS_FOLDER)
    await outbox.open()
    try:
        yield _start(AlertRaiser(store, clock, AlertDeliveries(outbox, webhook, clock, tasks)), tasks)
    finally:
        await tasks.stop()  # deliveries use the webhook; undelivered alerts stay on disk
        await webhook.close()


def _start(alerts: AlertRaiser, tasks: Tasks) -> AlertRaiser:
    alerts.start(tasks)
    return alerts


def load_checked_secret(webhook: WebhookConfig, environ: Mapping[str, str]) -> bytes:
    """Check the webhook's address and load its secret, for `check-config` and for a start. Raises ConfigError."""
    require_public_host(webhook.url)
    return load_secret(webhook, environ)


def require_public_host(url: str) -> None:
    """Reject a URL with a literal address that is not public. What a name resolves to is checked at each request.
    Raises ConfigError."""
    host = URL(url, encoded=True).host or ""
    try:
        ip_address(host)
    except ValueError:
        return
    if not is_public_address(host):
        raise ConfigError([f"alerts.webhook.url: {host} is not a public address"])


def load_secret(webhook: WebhookConfig, environ: Mapping[str, str]) -> bytes:
    """Load the secret that signs webhook requests. Raises a ConfigError, which never contains the secret."""
    if webhook.secret_file is not None:
        try:
            secret = Path(webhook.secret_file).read_bytes().strip()
        except OSError as failure:
            raise ConfigError([f"alerts.webhook: cannot read {webhook.secret_file}: {failure.strerror}"]) from None
    else:
        assert webhook.secret_env is not None
        secret = environ.get(webhook.secret_env, "").encode().strip()
        if not secret:
            raise ConfigError([f"alerts.webhook: the environment variable {webhook.secret_env} is not set"])
    if len(secret) < MIN_WEBHOOK_SECRET_BYTES:
        raise ConfigError([f"alerts.webhook: its secret has less than {MIN_WEBHOOK_SECRET_BYTES} bytes"])
    return secret


def add_alert_metrics(telemetry: MetricsRegistry, alerts: AlertRaiser) -> None:
    deliveries = alerts.deliveries
    telemetry.add(
        metrics.ALERTS_RAISED,
        lambda: [({"threshold": str(pct)}, float(count)) for pct, count in sorted(alerts.raised.items())],
    )
    telemetry.add(metrics.WEBHOOKS_DELIVERED, lambda: deliveries.delivered if deliveries else 0)
    telemetry.add(
        metrics.WEBHOOKS_FAILED,
        lambda: [
            ({"last": "false"}, deliveries.failed if deliveries else 0),
            ({"last": "true"}, deliveries.abandoned if deliveries else 0),
        ],
    )
    telemetry.add(metrics.WEBHOOKS_WAITING, lambda: deliveries.pending if deliveries else 0)
