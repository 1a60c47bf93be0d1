"""What is called over plain http, which shows prompts, spend and signed requests to everybody on the way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlsplit

from price_keeper.config.checks import is_plain_remote
from price_keeper.config.reader import RuleViolation

_PLAIN_HTTP_RISK = "plain http to another machine shows what is sent to everybody on the way: give https"


def endpoint_is_encrypted(endpoint: str | None, allow_insecure: bool) -> Iterator[RuleViolation]:
    if endpoint is not None and not allow_insecure and is_plain_remote(endpoint):
        yield ("endpoint",), f"{_PLAIN_HTTP_RISK}, or allow_insecure: true beside it"


def explain_insecure_url(url: str, key: str) -> str | None:
    """Why a client is not to call the address that botocore found, wherever it was configured."""
    return f"{_PLAIN_HTTP_RISK} in the AWS configuration, or {key}: true" if is_plain_remote(url) else None


def find_insecure_variables(services: Iterable[tuple[str, str]], environ: Mapping[str, str]) -> list[str]:
    """Of the variables from which botocore takes the addresses of these services, each with the key that allows any."""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return []
    problems: dict[str, str] = {}
    for service, key in services:
        service_variable = f"AWS_ENDPOINT_URL_{service}"
        name = service_variable if environ.get(service_variable) else "AWS_ENDPOINT_URL"
        url = environ.get(name, "")
        if is_plain_remote(url):
            problems.setdefault(name, f"{name}: {_PLAIN_HTTP_RISK}, or {key}: true")
        elif url and not _is_url(url):
            problems.setdefault(name, f"{name}: expected http(s)://host or http(s)://host:port")
    return list(problems.values())


def _is_url(text: str) -> bool:
    try:
        parsed = urlsplit(text)
    except ValueError:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.hostname)
