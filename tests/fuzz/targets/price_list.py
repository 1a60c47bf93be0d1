"""AWS's price list: of an entry that is not just so nothing is made, and what is made of one is a price."""

from __future__ import annotations

import json
from typing import Any

from price_keeper.usage.price_list import UnclearPrices, identify_model, parse_product, parse_usage_type, select_prices

from tests.fuzz.documents import document
from tests.fuzz.oracle import holds, same
from tests.fuzz.reader import Reader

REGION = "us-east-1"
NAMES = ("product", "attributes", "usagetype", "regionCode", "model", "servicename", "terms", "OnDemand",
         "priceDimensions", "a", "beginRange", "unit", "pricePerUnit", "USD", "inferenceType", "feature",
         "service_tier")  # fmt: skip
TEXTS = ("USE1-NovaLite-input-tokens", "USE1-NovaLite-cache-read-input-token-count-flex", "us-east-1", "Nova Lite",
         "USE1-MP:USE1_CacheReadInputTokenCount_Global-Units", "1K tokens", "1M tokens", "Units", "0.0006", "0",
         "Inf", "Input tokens", "Claude Sonnet 4.5 (Amazon Bedrock Edition)", "standard", "latency optimized",
         "9" * 30)  # fmt: skip
MODELS = ("amazon.nova-lite-v1:0", "us.anthropic.claude-sonnet-4-5-20250929-v1:0", "global.amazon.nova-lite-v1:0",
          "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc", "x.", ".")  # fmt: skip
WORDS = tuple(text.encode() for text in (*NAMES, *TEXTS))


def _entry(reader: Reader) -> bytes:
    """A good one, with a member put into it somewhere."""
    unit, usd = reader.pick(("1K tokens", "1M tokens", "Units")), reader.pick(("0.0006", "0", "1", "3e-7", "-1"))
    attributes: dict[str, Any] = {"usagetype": reader.pick(TEXTS), "regionCode": REGION, "model": reader.pick(TEXTS)}
    dimension: dict[str, Any] = {"unit": unit, "pricePerUnit": {"USD": usd}, "beginRange": "0"}
    whole: dict[str, Any] = {"product": {"attributes": attributes},
                             "terms": {"OnDemand": {"a": {"priceDimensions": {"b": dimension}}}}}  # fmt: skip
    place = reader.pick((whole, attributes, dimension, whole["product"], whole["terms"], dimension["pricePerUnit"]))
    name = reader.pick(NAMES)
    try:
        place[name] = json.loads(document(reader, NAMES, TEXTS))
        if reader.byte() % 2:
            place[name] = next(iter(place[name].values()), None)
    except (ValueError, RecursionError):
        del place[name if name in place else next(iter(place))]
    return json.dumps(whole).encode()


def one(data: bytes) -> None:
    reader = Reader(data)
    model = identify_model(reader.pick(MODELS))
    products = []
    for _ in range(1 + reader.byte() % 3):
        entry = document(reader, NAMES, TEXTS) if reader.byte() % 4 == 0 else _entry(reader)
        product = parse_product(entry.decode("utf-8", "surrogateescape"), REGION)
        if product is not None:
            holds(type(product.pico) is int and product.pico >= 0, f"no price: {product}")
            attributes = json.loads(entry)["product"]["attributes"]
            same(attributes["regionCode"], REGION, "where it is sold")
            usage = parse_usage_type(attributes["usagetype"])
            holds(usage is not None and usage.dimension == product.dimension, f"another kind: {product}")
            products.append(product)
    parse_usage_type(reader.some().decode("latin-1"))
    identify_model(reader.rest().decode("latin-1"))
    if model is not None:
        listed = select_prices(model, products)
        if not isinstance(listed, UnclearPrices):
            prices = {product.pico for product in products}
            for table in (*listed.tiers.values(), *listed.latencies.values()):
                holds(set(table.values()) <= prices, f"prices that are not in the list: {table}")
