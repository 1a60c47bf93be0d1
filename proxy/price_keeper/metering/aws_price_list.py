"""The AWS Price List, read whole or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from price_keeper.config.encryption import explain_insecure_url
from price_keeper.errors import PriceKeeperError
from price_keeper.metering.price_list import SERVICE_CODES, Product, product_of

# Of the Price List's own endpoint, which is in few regions and serves all.
HOME_REGION = "us-east-1"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
READ_SECONDS = 180.0  # of a region's whole list: some thirty pages
ATTEMPTS = 5  # of each page; it is throttled at a few calls a second
PAGE_SIZE = 100  # the most there is
MOST_PAGES = 200  # many times what there are; beyond it the pages go in a circle
FORMAT = "aws_v1"

_NONSENSE = "an answer that is not the AWS Price List's"


class PriceListUnreadable(PriceKeeperError):
    """Nothing was learned from the price list; the message says why."""


class AwsPriceList:
    """Needs the permission `pricing:GetProducts`. `endpoint` is for tests."""

    def __init__(self, endpoint: str | None = None, *, allow_insecure: bool = False) -> None:
        import aioboto3  # 50 MB and 0.2 s that those who set their own prices need not pay
        from aiobotocore.config import AioConfig

        from price_keeper.stores.dynamodb_credentials import StoreCredentials, create_session
        from price_keeper.verified import HostnameCheckingSession

        retries = {"total_max_attempts": ATTEMPTS, "mode": "standard"}
        self._config = AioConfig(
            connect_timeout=CONNECT_SECONDS, read_timeout=ANSWER_SECONDS, retries=retries, http_session_cls=HostnameCheckingSession
        )
        self._endpoint = endpoint
        self._allow_insecure = allow_insecure
        self._began = partial(create_session, StoreCredentials())
        self._session_of = aioboto3.Session
        self._session: Any = None

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        if self._session is None:
            self._session = self._session_of(botocore_session=await self._began())
        client = self._session.client("pricing", HOME_REGION, endpoint_url=self._endpoint, config=self._config)
        async with client as opened:
            why = None if self._allow_insecure else explain_insecure_url(opened.meta.endpoint_url, "upstream.allow_insecure")
            if why is not None:
                raise PriceListUnreadable(f"the address of the AWS Price List: {why}")
            yield opened

    async def read(self, region: str) -> list[Product]:
        with _told():
            async with asyncio.timeout(READ_SECONDS), self._client() as client:
                return [product for code in SERVICE_CODES for product in await _products(client, code, region)]

    async def probe(self) -> None:
        """Raises PriceListUnreadable unless we may ask for prices, of which it asks for one."""
        with _told():
            async with self._client() as client:
                answer = await client.get_products(ServiceCode=SERVICE_CODES[0], FormatVersion=FORMAT, MaxResults=1)
                _check_form(answer)


@contextmanager
def _told() -> Iterator[None]:
    import aiohttp
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as failure:  # its message may quote a session token
        code = failure.response.get("Error", {}).get("Code", "")
        raise PriceListUnreadable(f"the AWS Price List answers {code or 'with an error'}") from None
    except (BotoCoreError, aiohttp.ClientError, OSError) as failure:  # a time-out is an OSError
        raise PriceListUnreadable(f"no answer from the AWS Price List: {type(failure).__name__}") from None
    except (AttributeError, LookupError, TypeError, ValueError):  # botocore's parser, on what it was not made for
        raise PriceListUnreadable(_NONSENSE) from None


def _check_form(answer: Any) -> None:
    if answer["FormatVersion"] != FORMAT:
        raise PriceListUnreadable(_NONSENSE)


async def _products(client: Any, service_code: str, region: str) -> list[Product]:
    request = {
        "ServiceCode": service_code,
        "Filters": [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}],
        "FormatVersion": FORMAT,
        "MaxResults": PAGE_SIZE,
    }
    found: list[Product] = []
    for _ in range(MOST_PAGES):
        answer = await client.get_products(**request)
        _check_form(answer)
        # Not `.get`: botocore reads an answer with nothing in it out of whatever comes with status 200.
        found += [product for entry in answer["PriceList"] if (product := product_of(entry, region)) is not None]
        if not answer.get("NextToken"):
            return found
        request["NextToken"] = answer["NextToken"]
    raise PriceListUnreadable(f"the AWS Price List of {service_code} in {region} does not end")
