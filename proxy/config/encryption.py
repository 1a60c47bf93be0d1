"""What is called over plain http, which shows prompts, spend and signed requests to everybody on the way. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from proxy.config.checks import is_plain_remote
from proxy.config.reader import Mistake

_WHAT = "plain http to another machine shows what is sent to everybody on the way: give https"


def endpoint_is_encrypted(endpoint: str | None, allow_insecure: bool) -> Iterator[Mistake]:
    if endpoint is not None and not allow_insecure and is_plain_remote(endpoint):
        yield ("endpoint",), f"{_WHAT}, or allow_insecure: true beside it"


def refusal(url: str, key: str) -> str | None:
    """Why a client is not to call the address that botocore found, wherever it was configured."""
    return f"{_WHAT} in the AWS configuration, or {key}: true" if is_plain_remote(url) else None


def variable_mistakes(services: Iterable[tuple[str, str]], environ: Mapping[str, str]) -> list[str]:
    """Of the variables from which botocore takes the addresses of these services, each with the key that allows any."""
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return []
    problems: dict[str, str] = {}
    for service, key in services:
        own = f"AWS_ENDPOINT_URL_{service}"
        name = own if environ.get(own) else "AWS_ENDPOINT_URL"
        if is_plain_remote(environ.get(name, "")):
            problems.setdefault(name, f"{name}: {_WHAT}, or {key}: true")
    return list(problems.values())
