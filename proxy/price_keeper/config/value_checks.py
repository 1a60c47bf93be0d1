"""Checks of single values of the configuration. A check returns a complaint, or None if the value is valid.

Also decides which URLs send data unencrypted to another machine, and reports environment variables that would make
botocore use such a URL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit
from zoneinfo import available_timezones

from price_keeper.config.config_problems import did_you_mean
from price_keeper.config.config_reader import RuleViolation, ValueCheck
from price_keeper.domain import is_app_id, is_label, is_org_id
from price_keeper.operations import check_model_id
from price_keeper.price_dimensions import UNITS_BY_NAME

_DAY_SECS = 86_400
_MAX_PRICE = 1_000_000  # USD, for any unit: a dollar for a token is certainly a typing mistake


def matching(pattern: str, complaint: str) -> ValueCheck:
    compiled = re.compile(pattern)
    return lambda text: None if compiled.fullmatch(text) else complaint


def between(low: int, high: int) -> ValueCheck:
    return lambda number: None if low <= number <= high else f"expected {low} to {high}"


def at_least(low: int) -> ValueCheck:
    return lambda number: None if number >= low else f"expected at least {low}"


def positive(number: float | Decimal) -> str | None:
    return None if number > 0 else "expected more than 0"


def seconds(number: float) -> str | None:
    return None if 0.001 <= number <= _DAY_SECS else f"expected 0.001 to {_DAY_SECS} seconds"


def not_empty(complaint: str) -> Callable[[Sized], str | None]:
    return lambda items: None if len(items) else complaint


region = matching(r"[a-z]{2,8}(-[a-z]{1,12}){1,3}-[0-9]{1,2}", "expected an AWS region, such as us-east-1")
variable = matching(r"[A-Za-z_][A-Za-z0-9_]*", "expected the name of an environment variable")
path = matching(r"[^\x00-\x1f\x7f]{1,4096}", "expected a path")
name = matching(r"[A-Za-z0-9._:/-]{1,128}", "expected 1 to 128 letters, digits or any of ._:/-")
table_prefix = matching(r"[A-Za-z0-9_.-]{0,100}", "expected at most 100 letters, digits or any of _.-")
model = matching(
    r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._:/-]{0,2047}", "expected a Bedrock model id or inference-profile ARN"
)


def alias(text: str) -> str | None:
    try:
        check_model_id(text)
    except ValueError:
        return "expected a name that an app may call by: an ARN, or letters, digits and any of ._:-"
    return None


def org_id(text: str) -> str | None:
    return None if is_org_id(text) else "expected a UUID in lower case"


def app_id(text: str) -> str | None:
    return None if is_app_id(text) else "expected 1 to 64 letters, digits or any of ._-, and neither . nor .."


def label_name(text: str) -> str | None:
    expected = "1 to 64 letters, digits or any of ._-, beginning with a letter or digit"
    return None if is_label(text) else f"a label is named by {expected}"


def time_zone(name: str) -> str | None:
    zones = _list_time_zones()
    if name in zones:
        return None
    hint = did_you_mean(name, zones)
    return f"expected an IANA time zone{f' ({hint})' if hint else ''}"


@lru_cache(maxsize=1)
def _list_time_zones() -> frozenset[str]:
    return frozenset(available_timezones())  # cached, as it searches the disk


def price(usd_per_1m: Decimal) -> str | None:
    return _check_price(usd_per_1m, "USD for a million tokens", pico_per_token)


def unit_price(usd_per_1000: Decimal) -> str | None:
    return _check_price(usd_per_1000, "USD for a thousand units", pico_per_unit)


def unit_dimension(name: str) -> str | None:
    if name in UNITS_BY_NAME:
        return None
    hint = did_you_mean(name, UNITS_BY_NAME)
    return f"expected one of {', '.join(UNITS_BY_NAME)}{f' ({hint})' if hint else ''}"


def prices_of_units(usd_by_name: Mapping[str, Decimal]) -> str | None:
    complaints = ((name, _check_price(usd, "USD for one", pico_per_job)) for name, usd in usd_by_name.items())
    return next((f"{name}: {complaint}" for name, complaint in complaints if complaint is not None), None)


def job_price(usd: Decimal) -> str | None:
    return _check_price(usd, "USD for a job", pico_per_job)


def _check_price(usd: Decimal, what: str, pico: Callable[[Decimal], int]) -> str | None:
    if not 0 <= usd <= _MAX_PRICE:
        return f"expected 0 to {_MAX_PRICE} {what}"
    try:
        pico(usd)
    except ValueError as error:
        return str(error)
    return None


def pico_per_token(usd_per_1m: Decimal) -> int:
    """One USD for a million tokens is 10**6 pico-dollars for one token."""
    return _require_whole(Fraction(usd_per_1m) * 10**6, "six")


def pico_per_unit(usd_per_1000: Decimal) -> int:
    return _require_whole(Fraction(usd_per_1000) * 10**9, "nine")


def pico_per_job(usd: Decimal) -> int:
    return _require_whole(Fraction(usd) * 10**12, "twelve")


def _require_whole(pico: Fraction, decimals: str) -> int:
    """Raises ValueError for a price with a fraction of a pico-dollar, which counting would lose."""
    if pico.denominator != 1:
        raise ValueError(f"expected at most {decimals} decimals")
    return pico.numerator


def _is_host(text: str) -> bool:
    """A literal IP address, or a hostname. The last part of a hostname is not a number: that would be an address."""
    if len(text) > 253:
        return False
    try:
        return getattr(ip_address(text), "scope_id", None) is None
    except ValueError:
        part = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
        is_name = re.fullmatch(rf"({part}\.)*(?![0-9]+$){part}", text)
        return is_name is not None


def _parse_host(text: str) -> str | None:
    """The host without the brackets, which an IPv6 address must have and no other host may have."""
    is_bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if is_bracketed else text
    return host if (":" in host) is is_bracketed and _is_host(host) else None


def url(text: str) -> str | None:
    match = re.fullmatch(r"https?://(\[[^\]]*\]|[^\[\]:/]*)(:([0-9]{1,5}))?", text)
    if match is None or _parse_host(match[1]) is None or not 1 <= int(match[3] or 80) <= 65535:
        return "expected http(s)://host or http(s)://host:port and nothing after it"
    return None


def control_url(text: str) -> str | None:
    complaint = url(text)
    if complaint is None and is_plain_remote(text):
        return "expected https: secrets travel there; http is for loopback alone"
    return complaint


def is_plain_remote(text: str) -> bool:
    """Whether requests to the URL travel unencrypted to another machine.

    The URL is parsed as botocore parses it: blanks and control characters are skipped, and the default scheme is http.
    """
    text = re.sub(r"[\x00-\x20]", "", text)
    match = re.fullmatch(r"(?:http:)?//(\[[^\]/]*\]|[^/:]*)(:[0-9]*)?(/.*)?", text, re.IGNORECASE)
    if match is None:
        return text.lower().startswith(("http:", "//"))
    host = _parse_host(match[1])
    return host is None or not Address(host, 0).is_loopback


def upstream_endpoint(text: str) -> str | None:
    complaint = url(text)
    return f'{complaint}, or "simulated"' if complaint and text != "simulated" else None


@dataclass(frozen=True, slots=True)
class Address:
    """The address that a server listens on. Port 0 is any free port."""

    host: str
    port: int

    @classmethod
    def from_text(cls, text: str) -> Address:
        host, _, port = text.rpartition(":")
        parsed_host = _parse_host(host)
        if parsed_host is None or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise ValueError("expected host:port, such as 127.0.0.1:8080 or [::1]:8080")
        return cls(parsed_host, int(port))

    @property
    def is_loopback(self) -> bool:
        """`localhost` counts as loopback: RFC 6761 reserves the name, and an attacker who can make this machine
        resolve it to another address does not need the sidecar to spend its money."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_PLAIN_HTTP_RISK = "plain http to another machine shows what is sent to everybody on the way: give https"


def endpoint_is_encrypted(endpoint: str | None, allow_insecure: bool) -> Iterator[RuleViolation]:
    if endpoint is not None and not allow_insecure and is_plain_remote(endpoint):
        yield ("endpoint",), f"{_PLAIN_HTTP_RISK}, or allow_insecure: true beside it"


def explain_insecure_url(url: str, key: str) -> str | None:
    """Why a client must not call the address that botocore found in its configuration; None if it may."""
    return f"{_PLAIN_HTTP_RISK} in the AWS configuration, or {key}: true" if is_plain_remote(url) else None


def find_insecure_variables(services: Iterable[tuple[str, str]], environ: Mapping[str, str]) -> list[str]:
    """The problems of the variables that give botocore the addresses of these (service, allowing key) pairs."""
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
