"""Fetches the AWS Price List of one region: completely, or not at all. START HERE: `AwsPriceList`.

It imports aioboto3 when a client is made, so that installations with prices of their own do not pay for the import.
Errors never quote AWS's messages, which may hold a session token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from price_keeper.config.value_checks import explain_insecure_url
from price_keeper.errors import PriceKeeperError
from price_keeper.usage.price_list import SERVICE_CODES, Product, parse_product

# The region of the Price List's endpoint, which exists in few regions and serves all.
PRICE_LIST_REGION = "us-east-1"
CONNECT_TIMEOUT_SECONDS = 5.0
RESPONSE_TIMEOUT_SECONDS = 30.0
LIST_TIMEOUT_SECONDS = 180.0  # for the whole list of a region: about thirty pages
MAX_ATTEMPTS = 5  # per page; the API allows only a few calls a second
PAGE_SIZE = 100  # the maximum of the API
MAX_PAGES = 200  # many times the number that exist; beyond it the pages must be repeating
PRICE_LIST_FORMAT = "aws_v1"

_MALFORMED = "an answer that is not the AWS Price List's"


class PriceListUnreadable(PriceKeeperError):
    """The list could not be read completely; the message says why."""


class AwsPriceList:
    """Needs the permission `pricing:GetProducts`. `endpoint` is for tests."""

    def __init__(self, endpoint: str | None = None, *, allow_insecure: bool = False) -> None:
        import aioboto3  # takes 50 MB and 0.2 s, which installations with their own prices should not pay
        from aiobotocore.config import AioConfig

        from price_keeper.aws_session import HostnameCheckingSession
        from price_keeper.stores.dynamodb_credentials import StoreCredentials, create_session

        retries = {"total_max_attempts": MAX_ATTEMPTS, "mode": "standard"}
        self._config = AioConfig(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=RESPONSE_TIMEOUT_SECONDS,
            retries=retries,
            http_session_cls=HostnameCheckingSession,
        )
        self._endpoint = endpoint
        self._allow_insecure = allow_insecure
        self._load_botocore_session = partial(create_session, StoreCredentials())
        self._make_session = aioboto3.Session
        self._session: Any = None

    @asynccontextmanager
    async def _open_client(self) -> AsyncIterator[Any]:
        if self._session is None:
            self._session = self._make_session(botocore_session=await self._load_botocore_session())
        client = self._session.client("pricing", PRICE_LIST_REGION, endpoint_url=self._endpoint, config=self._config)
        async with client as opened:
            why = (
                None
                if self._allow_insecure
                else explain_insecure_url(opened.meta.endpoint_url, "upstream.allow_insecure")
            )
            if why is not None:
                raise PriceListUnreadable(f"the address of the AWS Price List: {why}")
            yield opened

    async def read(self, region: str) -> list[Product]:
        with _translate_errors():
            async with asyncio.timeout(LIST_TIMEOUT_SECONDS), self._open_client() as client:
                return [product for code in SERVICE_CODES for product in await _fetch_products(client, code, region)]

    async def probe(self) -> None:
        """Ask for one price. Raises PriceListUnreadable if that is not permitted or fails."""
        with _translate_errors():
            async with self._open_client() as client:
                answer = await client.get_products(
                    ServiceCode=SERVICE_CODES[0], FormatVersion=PRICE_LIST_FORMAT, MaxResults=1
                )
                _check_format(answer)


@contextmanager
def _translate_errors() -> Iterator[None]:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as failure:  # its message may quote a session token, so only the code is used
        code = failure.response.get("Error", {}).get("Code", "")
        raise PriceListUnreadable(f"the AWS Price List answers {code or 'with an error'}") from None
    except (BotoCoreError, aiohttp.ClientError, OSError) as failure:  # a timeout is an OSError
        raise PriceListUnreadable(f"no answer from the AWS Price List: {type(failure).__name__}") from None
    except (AttributeError, LookupError, TypeError, ValueError):  # from botocore's parser, for an unexpected response
        raise PriceListUnreadable(_MALFORMED) from None


def _check_format(answer: Any) -> None:
    if answer["FormatVersion"] != PRICE_LIST_FORMAT:
        raise PriceListUnreadable(_MALFORMED)


async def _fetch_products(client: Any, service_code: str, region: str) -> list[Product]:
    request = {
        "ServiceCode": service_code,
        "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        "FormatVersion": PRICE_LIST_FORMAT,
        "MaxResults": PAGE_SIZE,
    }
    products: list[Product] = []
    for _ in range(MAX_PAGES):
        answer = await client.get_products(**request)
        _check_format(answer)
        # Not `.get`: botocore turns any response of status 200 into an answer without members.
        products += [product for entry in answer["PriceList"] if (product := parse_product(entry, region)) is not None]
        if not answer.get("NextToken"):
            return products
        request["NextToken"] = answer["NextToken"]
    raise PriceListUnreadable(f"the AWS Price List of {service_code} in {region} does not end")
