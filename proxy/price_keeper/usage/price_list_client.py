"""Fetches the AWS Price List of one region: completely, or not at all. START HERE: `AwsPriceList`.

Signed and sent without AWS's libraries, which every start would pay for with 10 MB and 0.3 s. Botocore is asked only
where there is a shared configuration file, which may name another endpoint or authority. Errors never quote AWS's
messages, which may hold a session token.
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from yarl import URL

from price_keeper.client_tls import get_client_context
from price_keeper.clock import SystemClock
from price_keeper.config.value_checks import explain_insecure_url
from price_keeper.errors import PriceKeeperError
from price_keeper.provider_chain import ProviderChain
from price_keeper.upstream.aws_credentials import parse_credentials
from price_keeper.upstream.sigv4 import AwsCredentials, Signer
from price_keeper.usage.price_list import SERVICE_CODES, Product, parse_product

# The region of the Price List's endpoint, which exists in few regions and serves all.
PRICE_LIST_REGION = "us-east-1"
ENDPOINT = f"https://api.pricing.{PRICE_LIST_REGION}.amazonaws.com"
CONNECT_TIMEOUT_SECONDS = 5.0
RESPONSE_TIMEOUT_SECONDS = 30.0
LIST_TIMEOUT_SECONDS = 180.0  # for the whole list of a region: about thirty pages
MAX_ATTEMPTS = 5  # per page; the API allows only a few calls a second
MAX_BACKOFF_SECONDS = 20.0
PAGE_SIZE = 100  # the maximum of the API
MAX_PAGES = 200  # many times the number that exist; beyond it the pages must be repeating
MAX_PAGE_BYTES = 32 * 1024 * 1024  # many times a page of 100 products
PRICE_LIST_FORMAT = "aws_v1"

_JSON = "application/x-amz-json-1.1"
_TARGET = "AWSPriceListService.GetProducts"
_TRANSIENT_STATUSES = (429, 500, 502, 503, 504)
_THROTTLING = ("Throttl", "TooManyRequests", "RequestLimitExceeded", "SlowDown")
_MALFORMED = "an answer that is not the AWS Price List's"


class PriceListUnreadable(PriceKeeperError):
    """The list could not be read completely; the message says why."""


class _ErrorAnswer(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.code = code
        self.is_transient = status in _TRANSIENT_STATUSES or any(word in code for word in _THROTTLING)
        super().__init__(code)


class _AwsSettings(NamedTuple):
    endpoint: str
    authority: str | None  # a file with certificates, instead of those that the system trusts


class AwsPriceList:
    """Needs the permission `pricing:GetProducts`. `endpoint` is for tests."""

    def __init__(self, endpoint: str | None = None, *, allow_insecure: bool = False) -> None:
        self._endpoint = endpoint
        self._allow_insecure = allow_insecure
        self._chain = ProviderChain()
        self._signer = Signer(PRICE_LIST_REGION, "pricing")
        self._now: Callable[[], float] = SystemClock.now

    async def read(self, region: str) -> list[Product]:
        with _translate_errors():
            async with asyncio.timeout(LIST_TIMEOUT_SECONDS), self._open_client() as client:
                return [product for code in SERVICE_CODES for product in await _fetch_products(client, code, region)]

    async def probe(self) -> None:
        """Ask for one price. Raises PriceListUnreadable if that is not permitted or fails."""
        with _translate_errors():
            async with self._open_client() as client:
                query = {"ServiceCode": SERVICE_CODES[0], "FormatVersion": PRICE_LIST_FORMAT, "MaxResults": 1}
                _check_format(await client.get_products(query))

    @asynccontextmanager
    async def _open_client(self) -> AsyncIterator[_Client]:
        settings = await asyncio.to_thread(_read_aws_settings)
        endpoint = self._endpoint or settings.endpoint
        why = None if self._allow_insecure else explain_insecure_url(endpoint, "upstream.allow_insecure")
        if why is not None:
            raise PriceListUnreadable(f"the address of the AWS Price List: {why}")
        self._chain.replace()  # a chain reads its source only once, and the last one may have expired
        found = await self._chain.load()
        if found is None:
            raise PriceListUnreadable("no AWS credentials were found to read the AWS Price List with")
        try:
            credentials = parse_credentials(found)
        except ValueError as failure:
            raise PriceListUnreadable(f"the AWS credentials cannot be used: {failure}") from None
        tls = await asyncio.to_thread(_choose_tls, settings.authority)
        timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_SECONDS, sock_read=RESPONSE_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), timeout=timeout) as session:
            yield _Client(session, endpoint, self._signer, credentials, self._now)


class _Client:
    """Sends signed requests for pages of the list, and repeats those that failed in passing."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        endpoint: str,
        signer: Signer,
        credentials: AwsCredentials,
        now: Callable[[], float],
    ) -> None:
        parts = urlsplit(endpoint)
        self._session = session
        self._url = URL(endpoint)
        self._path = parts.path or "/"
        self._host = parts.netloc.rpartition("@")[2].removesuffix(":443" if parts.scheme == "https" else ":80")
        self._proxy = _find_proxy(parts.scheme, parts.netloc)
        self._signer = signer
        self._credentials = credentials
        self._now = now

    async def get_products(self, query: dict[str, Any]) -> Any:
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._post(orjson.dumps(query))
            except (_ErrorAnswer, aiohttp.ClientError, TimeoutError) as failure:
                is_transient = not isinstance(failure, _ErrorAnswer) or failure.is_transient
                if attempt + 1 >= MAX_ATTEMPTS or not is_transient:
                    raise
            await asyncio.sleep(random.random() * min(2**attempt, MAX_BACKOFF_SECONDS))
        raise AssertionError("there is no attempt")

    async def _post(self, body: bytes) -> Any:
        signed = [("content-type", _JSON), ("x-amz-target", _TARGET)]
        hashed = sha256(body).hexdigest()
        lines = self._signer.sign(self._credentials, "POST", self._path, "", self._host, signed, hashed, self._now())
        headers = dict(line.split(": ", 1) for line in lines.decode().splitlines()) | dict(signed)
        async with self._session.post(
            self._url,
            data=body,
            headers=headers | {"host": self._host, "accept-encoding": "identity"},
            proxy=self._proxy,
            allow_redirects=False,
        ) as response:
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > MAX_PAGE_BYTES:
                    raise ValueError("the page is too large")
            if response.status != 200:
                raise _ErrorAnswer(response.status, _read_error_code(answer) or str(response.status))
            return orjson.loads(answer)


def _choose_tls(authority: str | None) -> ssl.SSLContext:
    return get_client_context() if authority is None else ssl.create_default_context(cafile=authority)


def _read_aws_settings() -> _AwsSettings:
    """Where the list is and which certificates to trust, by the environment and AWS's shared configuration file."""
    file = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    if not Path(file).expanduser().exists() and not any(name.startswith("AWS_ENDPOINT_URL") for name in os.environ):
        return _AwsSettings(ENDPOINT, os.environ.get("AWS_CA_BUNDLE") or None)
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.session import Session

    session = Session()
    configured = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "pricing")
    ignored = session.get_config_variable("ignore_configured_endpoint_urls")
    return _AwsSettings(
        (not ignored and configured.provide()) or ENDPOINT, session.get_config_variable("ca_bundle") or None
    )


def _find_proxy(scheme: str, netloc: str) -> str | None:
    """The proxy that the environment names, as botocore would find it."""
    proxy = None if proxy_bypass(netloc) else getproxies().get(scheme)
    return proxy if proxy is None or "://" in proxy else f"http://{proxy.removeprefix('//')}"


def _read_error_code(answer: bytes | bytearray) -> str:
    try:
        kind = orjson.loads(answer)["__type"]
    except (LookupError, TypeError, ValueError):
        return ""
    return kind.rpartition("#")[2].partition(":")[0] if isinstance(kind, str) else ""


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except PriceListUnreadable:
        raise
    except _ErrorAnswer as failure:  # AWS's message may quote a session token, so only the code is used
        raise PriceListUnreadable(f"the AWS Price List answers {failure.code}") from None
    except (AttributeError, LookupError, TypeError, ValueError):  # of what came
        raise PriceListUnreadable(_MALFORMED) from None
    except Exception as failure:  # of the connection, or a provider of credentials; both raise whatever they like
        raise PriceListUnreadable(f"no answer from the AWS Price List: {type(failure).__name__}") from None


def _check_format(answer: Any) -> None:
    if answer["FormatVersion"] != PRICE_LIST_FORMAT:
        raise PriceListUnreadable(_MALFORMED)


async def _fetch_products(client: _Client, service_code: str, region: str) -> list[Product]:
    query: dict[str, Any] = {
        "ServiceCode": service_code,
        "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        "FormatVersion": PRICE_LIST_FORMAT,
        "MaxResults": PAGE_SIZE,
    }
    products: list[Product] = []
    for _ in range(MAX_PAGES):
        answer = await client.get_products(query)
        _check_format(answer)
        products += [product for entry in answer["PriceList"] if (product := parse_product(entry, region)) is not None]
        if not answer.get("NextToken"):
            return products
        query["NextToken"] = answer["NextToken"]
    raise PriceListUnreadable(f"the AWS Price List of {service_code} in {region} does not end")
