"""Checks of services other than Bedrock and the store: the AWS Price List, and the webhook that receives alerts."""

from __future__ import annotations

import asyncio
import socket

from yarl import URL

from price_keeper.alerts.alert_setup import load_secret
from price_keeper.alerts.webhook import is_public_address
from price_keeper.doctor.doctor_checks import Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import PROBE_TIMEOUT_SECONDS
from price_keeper.errors import ConfigError
from price_keeper.usage.price_list_client import AwsPriceList, PriceListUnreadable


async def check_price_list(context: DoctorContext) -> Finding:
    if not context.follows_prices:
        return skipped("Bedrock is simulated" if context.is_simulated else "every label has price_source: config")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
            await AwsPriceList(allow_insecure=context.config.upstream.allow_insecure).probe()
    except PriceListUnreadable as failure:
        return _build_price_list_warning(str(failure))
    except TimeoutError:
        return _build_price_list_warning("no answer from the AWS Price List")
    return ok("the AWS Price List answers")


def _build_price_list_warning(reason: str) -> Finding:
    """Only a warning: a sidecar works without the price list, with the prices of its configuration."""
    allow = "allow pricing:GetProducts by IAM, and let this machine out to api.pricing.us-east-1.amazonaws.com"
    remedy = f"{allow}; or set price_source: config for every label"
    return warning(f"{reason}; the configuration's prices stay in force", remedy)


async def check_webhook(context: DoctorContext) -> Finding:
    config = context.config.alerts.webhook
    if config is None:
        return skipped("there is no alerts.webhook")
    url = URL(config.url, encoded=True)
    host, port = url.host or "", url.port or 443
    try:
        await asyncio.to_thread(load_secret, config, context.environ)
    except ConfigError as failure:
        variable = config.secret_env or "alerts.webhook.secret_file"
        return trouble("; ".join(failure.problems), f"set {variable}: openssl rand -base64 32")
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return trouble(f"{host}: the name does not resolve", f"correct alerts.webhook.url, or DNS: getent hosts {host}")
    private = sorted({str(each[4][0]) for each in addresses if not is_public_address(str(each[4][0]))})
    if private:
        remedy = "alerts go to public addresses alone: name another receiver in alerts.webhook.url"
        return trouble(f"{host} is at {', '.join(private)}, which is not public", remedy)
    return ok(f"{host}:{port} is at a public address; nothing was sent")
