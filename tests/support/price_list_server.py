"""The AWS Price List for tests: products as AWS writes them, and a server that speaks its protocol on 127.0.0.1.

The products follow what the real list had in 2026: how it spells models and usage types, its units, and its figures.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

CODES = {"us-east-1": "USE1", "us-west-2": "USW2", "eu-west-1": "EU", "ap-northeast-1": "APN1"}
BEDROCK, MODELS = "AmazonBedrock", "AmazonBedrockFoundationModels"

_TARGET = "AWSPriceListService.GetProducts"
_JSON = "application/x-amz-json-1.1"
_SIGNED = re.compile(r"AWS4-HMAC-SHA256 Credential=\w+/[0-9]{8}/us-east-1/pricing/aws4_request, ")
_skus = count(1)


@dataclass(frozen=True)
class ListedProduct:
    service_code: str
    attributes: dict[str, str]
    entry: str  # as it stands in an answer: JSON in a string


def list_product(service_code: str, usd: str, unit: str, region: str = "us-east-1", **attributes: str) -> ListedProduct:
    sku = f"SKU{next(_skus):013}"
    common_attributes = {
        "servicecode": service_code,
        "regionCode": region,
        "locationType": "AWS Region",
        "operation": "",
    }
    attributes = common_attributes | {"servicename": "Amazon Bedrock"} | attributes
    dimension = {
        "unit": unit,
        "endRange": "Inf",
        "beginRange": "0",
        "description": f"${usd} per {unit} for {attributes['usagetype']}",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": {"USD": usd},
    }
    term = {
        "priceDimensions": {dimension["rateCode"]: dimension},
        "sku": sku,
        "effectiveDate": "2026-11-01T00:00:00Z",
        "offerTermCode": "JRTCKXETXF",
        "termAttributes": {},
    }
    document = {
        "product": {"productFamily": "Amazon Bedrock", "attributes": attributes, "sku": sku},
        "serviceCode": service_code,
        "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}},
        "version": "20261117204242",
        "publicationDate": "2026-11-17T20:42:42Z",
    }
    return ListedProduct(service_code, attributes, json.dumps(document))


def list_native(model: str, usage: str, usd_per_1k: str, region: str = "us-east-1", **more: str) -> ListedProduct:
    """A model that AWS sells itself. `usage` without its region."""
    attributes = {"model": model, "usagetype": f"{CODES[region]}-{usage}", "feature": "On-demand Inference"} | more
    return list_product(BEDROCK, usd_per_1k, "1K tokens", region, **attributes)


def list_marketplace(
    model: str, usage: str, usd_per_1m: str, region: str = "us-east-1", unit: str = "1M tokens", **more: str
) -> ListedProduct:
    """A model that is sold through the Marketplace."""
    code = CODES[region]
    attributes = {"servicename": f"{model} (Amazon Bedrock Edition)", "usagetype": f"{code}-MP:{code}_{usage}-Units"}
    return list_product(MODELS, usd_per_1m, unit, region, **attributes, **more)


_CAMEL = ("InputTokenCount", "OutputTokenCount", "CacheReadInputTokenCount", "CacheWriteInputTokenCount")
_CAMEL_1H = "CacheWrite1hInputTokenCount"


def list_claude(model: str, usd: str, region: str = "us-east-1", routing: str = "") -> list[ListedProduct]:
    """The five prices, as usage types were written up to Claude 4.6; `routing` is "" or "_Global"."""
    kinds = [f"{kind}{routing}" for kind in (*_CAMEL, _CAMEL_1H)]
    return [list_marketplace(model, kind, price, region) for kind, price in zip(kinds, usd.split(), strict=True)]


def list_new_claude(model: str, usd: str, region: str = "us-east-1", routing: str = "") -> list[ListedProduct]:
    """The same, as they are written since; `routing` is "" or "global_"."""
    kinds = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cache_write_tokens_1h")
    return [
        list_marketplace(model, f"{kind}_{routing}standard", price, region)
        for kind, price in zip(kinds, usd.split(), strict=True)
    ]


def list_nova(model: str, slug: str, usd: str, region: str = "us-east-1", tier: str = "") -> list[ListedProduct]:
    """Input, output, cache read and write; `tier` is "", "-flex" or the like."""
    kinds = {
        "input-tokens": "Input tokens",
        "output-tokens": "Output tokens",
        "cache-read-input-token-count": "Prompt cache read input tokens",
        "cache-write-input-token-count": "Prompt cache write input tokens",
    }
    return [
        list_native(model, f"{slug}-{usage}{tier}", price, region, inferenceType=provider_words, provider="Amazon")
        for (usage, provider_words), price in zip(kinds.items(), usd.split(), strict=False)
    ]


# What stands between the prices that are looked for.
NOISE = [
    list_native("Nova Lite", "NovaLite-input-tokens-batch", "0.0000300000", inferenceType="Input tokens batch"),
    list_native("Nova Lite", "NovaLite-cache-write-input-token-count-custom-model", "0.0000000000"),
    list_native("Nova Canvas", "NovaCanvas-T2I-1024-Standard", "0.0400000000", inferenceType="T2I 1024 Standard"),
    list_native("Nova Sonic", "NovaSonic-speech-input-tokens", "0.0034000000", inferenceType="Speech input tokens"),
    list_product(BEDROCK, "0.0001500000", "1K TextUnit", usagetype="USE1-Guardrail-ContentPolicyUnitsConsumed"),
    list_product(
        BEDROCK, "39.6000000000", "Hours", usagetype="USE1-NovaPro-ProvisionedThroughput-6MonthCommit-ModelUnits"
    ),
    list_marketplace("Claude Sonnet 4.5", "InputTokenCount_Batch", "1.6500000000"),
    list_marketplace("Claude Sonnet 4.5", "InputTokenCount_LCtx", "6.6000000000"),
    list_marketplace("Claude Sonnet 4.5", "Reserved_1Month_InputTPM_Geo", "0.1980000000", unit="1K TPM Hour"),
    list_marketplace("Cohere Rerank v3.5", "search_units", "0.0020000000", unit="Units"),
]

SONNET = list_claude("Claude Sonnet 4.5", "3.3 16.5 0.33 4.125 6.6")
SONNET_GLOBAL = list_claude("Claude Sonnet 4.5", "3 15 0.3 3.75 6", routing="_Global")
HAIKU = list_claude("Claude Haiku 4.5", "1.1 5.5 0.11 1.375 2.2")
NOVA_LITE = list_nova("Nova Lite", "NovaLite", "0.0000600000 0.0002400000 0.0000150000 0.0000000000")
NOVA_LITE_FLEX = list_nova("Nova Lite", "NovaLite", "0.0000300000 0.0001200000 0.0000075000", tier="-flex")

US_EAST = [*NOISE, *SONNET, *SONNET_GLOBAL, *HAIKU, *NOVA_LITE, *NOVA_LITE_FLEX]


# ---------------------------------------------------------------- the server


@dataclass(frozen=True)
class Fault:
    """An answer that is given instead of the right one; `seconds` later."""

    status: int
    body: bytes
    seconds: float = 0


def error(kind: str, status: int = 400) -> Fault:
    return Fault(status, json.dumps({"__type": f"com.amazonaws.pricing#{kind}", "Message": "by the script"}).encode())


THROTTLED = error("ThrottlingException")
DENIED = error("AccessDeniedException")
BROKEN = error("InternalErrorException", 500)


@dataclass
class PriceListServer:
    url: str
    products: list[ListedProduct] = field(default_factory=lambda: list(US_EAST))
    page_size: int = 7  # AWS has pages of a hundred; small ones need more of them
    faults: deque[Fault] = field(default_factory=deque)  # for the next requests, one each
    always: Fault | None = None
    gate: asyncio.Event | None = None  # where requests that come now wait
    calls: list[dict[str, Any]] = field(default_factory=list)
    _pages: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    @property
    def reads(self) -> list[tuple[str, str]]:
        """Which lists were asked for from their beginning: the service code and the region."""
        return [(call["ServiceCode"], call["Filters"][0]["Value"]) for call in self.calls if "NextToken" not in call]

    def add_faults(self, *faults: Fault) -> None:
        self.faults.extend(faults)

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["X-Amz-Target"] == _TARGET
        assert request.headers["Content-Type"] == _JSON
        assert _SIGNED.match(request.headers["Authorization"])
        query = json.loads(await request.read())
        self.calls.append(query)
        if self.gate is not None:
            await self.gate.wait()
        fault = self.faults.popleft() if self.faults else self.always
        if fault is None:
            return self._page(query)
        await asyncio.sleep(fault.seconds)
        return _response(fault.status, fault.body)

    def _page(self, query: dict[str, Any]) -> web.Response:
        entries, start = self._pages.pop(query.get("NextToken", ""), (None, 0))
        if entries is None:
            if "NextToken" in query:
                invalid = error("InvalidNextTokenException")
                return _response(invalid.status, invalid.body)
            entries = [product.entry for product in self.products if _matches(product, query)]
        end = start + min(self.page_size, query["MaxResults"])
        page: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": entries[start:end]}
        if end < len(entries):
            page["NextToken"] = f"page-{len(self.calls)}"
            self._pages[page["NextToken"]] = entries, end
        return _response(200, json.dumps(page).encode())


def _matches(product: ListedProduct, query: dict[str, Any]) -> bool:
    assert all(each["Type"] == "TERM_MATCH" for each in query.get("Filters", ()))
    terms = {each["Field"]: each["Value"].lower() for each in query.get("Filters", ())}
    return product.service_code == query["ServiceCode"] and all(
        product.attributes.get(name, "").lower() == value for name, value in terms.items()
    )


def _response(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, headers={"Content-Type": _JSON, "x-amzn-RequestId": "0-1-2-3"})


@asynccontextmanager
async def price_list_server(products: Iterable[ListedProduct] = US_EAST) -> AsyncIterator[PriceListServer]:
    server = PriceListServer("", list(products))
    app = web.Application()
    app.router.add_post("/", server.answer)
    async with TestServer(app) as listener:
        server.url = f"http://127.0.0.1:{listener.port}"
        yield server
