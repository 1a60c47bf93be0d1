"""Labels, their endpoints and every kind of price: which values are valid, and the line of each that is not."""

from __future__ import annotations

from decimal import Decimal

import pytest
from price_keeper.config.config_sections import PicoPrices, PricesConfig, TierPrices, parse_config

from tests.support.configs import LABELS, label, problems, read

# Of all policies but one.
UNITS = (
    "content: 0.15, content_image: 0.75, topic: 0.15, sensitive_information: 0.1, contextual_grounding: 0.1, "
    "check_content_filter: 0.07, check_prompt_attack: 0.08, check_sensitive_information: 0.1"
)


def test_prices_per_token_are_whole_pico_dollars() -> None:
    text = label(
        prices="{input: 3.00, output: 0.000001, cache_read: 1000000, service_tiers: {flex: {input: 1.5, output: 0}}}"
    )
    prices = parse_config(text, "", {}).labels["one"].prices_usd_per_1m
    assert prices.pico_per_token == PicoPrices(3_000_000, 1, 10**12, None, None)
    assert prices.service_tiers["flex"].pico_per_token == PicoPrices(1_500_000, 0, None, None, None)


def test_price_with_fraction_of_pico_dollar_is_rejected() -> None:
    with pytest.raises(ValueError, match="six decimals"):
        _ = PricesConfig(Decimal("0.0000001"), Decimal(1)).pico_per_token


def test_unit_and_job_prices_are_whole_pico_dollars() -> None:
    config = read(f"guardrails: {{prices_usd_per_1000_units: {{{UNITS}, automated_reasoning: 0.000000001}}}}")
    assert config.guardrails is not None
    assert config.guardrails.pico_per_unit("topic") == 150_000_000
    assert config.guardrails.pico_per_unit("automated_reasoning") == 1
    assert config.guardrails.pico_per_unit("word") == 0
    one = parse_config(label("    price_usd_per_async_job: 0.000000000001"), "", {}).labels["one"]
    assert one.pico_per_async_job == 1


def test_label_may_state_max_output_tokens() -> None:
    assert parse_config(label("    max_output_tokens: 4096"), "", {}).labels["one"].max_output_tokens == 4096
    assert read("").labels["one"].max_output_tokens is None


def test_missing_prices_of_guardrails_and_jobs_are_none() -> None:
    assert read("").guardrails is None
    assert read("").labels["one"].pico_per_async_job is None


def test_endpoint_may_have_its_own_prices() -> None:
    places = "[{region: eu-west-1}, {region: us-east-1, prices_usd_per_1m: {input: 3, output: 4}}]"
    one = parse_config(label(f"    endpoints: {places}"), "", {}).labels["one"]
    first, second = one.endpoints
    assert one.prices_at(first) == one.prices_usd_per_1m
    assert one.prices_at(second).input == 3


def test_every_price_table_has_its_path() -> None:
    prices = (
        "{input: 1, output: 2, latency_optimized: {input: 3, output: 4}, service_tiers: {flex: {input: 5, output: 6}}, "
        "long_context: {above_input_tokens: 200000, input: 7, output: 8}}"
    )
    found = parse_config(label(prices=prices), "", {}).labels["one"].prices_usd_per_1m
    assert {path: table.input for path, table in found.iterate_tables()} == {
        (): 1,
        ("service_tiers", "flex"): 5,
        ("latency_optimized",): 3,
        ("long_context",): 7,
    }
    assert found.long_context is not None
    assert found.long_context.above_input_tokens == 200_000
    assert found.long_context.pico_per_token == PicoPrices(7_000_000, 8_000_000, None, None, None)


def test_prices_come_from_price_list_unless_negotiated() -> None:
    assert parse_config(label(), "", {}).labels["one"].price_source == "aws"
    assert parse_config(label("    price_source: config"), "", {}).labels["one"].price_source == "config"


def test_anthropic_label_needs_no_cache_prices() -> None:
    assert parse_config(label(format="anthropic"), "", {}).labels["one"].prices_usd_per_1m.cache_read is None


def test_unlabelled_models_may_have_default_price() -> None:
    price = "{input: 1, output: 2, cache_read: 3, cache_write_5m: 4, cache_write_1h: 5}"
    found = read(f"unlabelled: meter\ndefault_price: {price}").default_price
    assert found == TierPrices(*map(Decimal, (1, 2, 3, 4, 5)))


@pytest.mark.parametrize(
    "model",
    [
        "amazon.nova-lite-v1:0",
        "us.anthropic.claude-sonnet-4-5-20250929-v1:0",
        "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/a1b2c3",
        "m" * 2048,
    ],
)
def test_model_id_is_accepted(model: str) -> None:
    assert parse_config(label().replace("model: m", f"model: {model}"), "", {}).labels["one"].model == model


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("labels: {}", "1: labels: at least one label is needed"),
        ("\nlabels:", "2: labels: expected a mapping, found null"),
        (
            label(prices="{input: 0.1234567, output: 2}"),
            "5: labels.one.prices_usd_per_1m.input: expected at most six decimals, found 0.1234567",
        ),
        (
            label(prices="{input: -1, output: 2}"),
            "5: labels.one.prices_usd_per_1m.input: expected 0 to 1000000 USD for a million tokens, found -1",
        ),
        (
            label(prices="{input: 1, output: 1000000.1}"),
            "5: labels.one.prices_usd_per_1m.output: expected 0 to 1000000 USD for a million tokens, found 1000000.1",
        ),
        (label(prices="{output: 2}"), "5: labels.one.prices_usd_per_1m.input: required, but missing"),
        (
            label(prices="{input: 1, output: 1, service_tiers: {flexx: {input: 1, output: 1}}}"),
            "5: labels.one.prices_usd_per_1m.service_tiers.flexx: "
            'expected one of flex, priority, reserved (did you mean "flex"?)',
        ),
        *(
            (
                label(prices=f"{{input: 1, output: 1, long_context: {{{table}}}}}"),
                f"5: labels.one.prices_usd_per_1m.long_context{what}",
            )
            for table, what in (
                ("input: 2, output: 2", ".above_input_tokens: required, but missing"),
                ("above_input_tokens: 200000, output: 2", ".input: required, but missing"),
                (
                    "above_input_tokens: 200, input: 2, output: 2",
                    ".above_input_tokens: expected 1000 to 100000000, found 200",
                ),
                (
                    "above_input_tokens: 0.2, input: 2, output: 2",
                    ".above_input_tokens: expected a whole number, found 0.2",
                ),
                (
                    "above_tokens: 9000, above_input_tokens: 9000, input: 2, output: 2",
                    '.above_tokens: unknown key; did you mean "above_input_tokens"?',
                ),
            )
        ),
        (
            label(prices="{input: 1, output: 1, service_tiers: {default: {input: 1, output: 1}}}"),
            "5: labels.one.prices_usd_per_1m.service_tiers.default: expected one of flex, priority, reserved",
        ),
        (
            label(
                "    endpoints:\n    - {region: us-east-1, endpoint: 'https://a'}\n"
                "    - {region: us-east-1, model: m, prices_usd_per_1m: {input: 1, output: 1}}"
            ),
            "8: labels.one.endpoints.1.prices_usd_per_1m: "
            "not those of endpoints.0, which is the same model in the same region",
        ),
        (
            label("    price_usd_per_async_job: 0.0000000000001"),
            "6: labels.one.price_usd_per_async_job: expected at most twelve decimals, found 0.0000000000001",
        ),
        (
            label("    price_usd_per_async_job: -1"),
            "6: labels.one.price_usd_per_async_job: expected 0 to 1000000 USD for a job, found -1",
        ),
        *(
            (
                label(f"    max_output_tokens: {number}"),
                f"6: labels.one.max_output_tokens: expected 1 to 10000000, found {number}",
            )
            for number in (0, -1, 10_000_001)
        ),
        *(
            (
                label(f"  {name}: {{model: n, format: llama, prices_usd_per_1m: {{input: 1, output: 1}}}}"),
                f"6: labels.{name}: the name under which {what} are counted",
            )
            for name, what in (("guardrails", "guardrails"), ("async-jobs", "async jobs"))
        ),
        (
            label("    price_source: AWS"),
            '6: labels.one.price_source: expected one of aws, config (did you mean "aws"?), found "AWS"',
        ),
        (
            label("  two: {model: m, format: llama, prices_usd_per_1m: {input: 1, output: 1}}"),
            "6: labels.two.model: the same model as labels.one",
        ),
        (
            label("  m: {model: n, format: llama, prices_usd_per_1m: {input: 1, output: 1}}"),
            "3: labels.one.model: also the name of another label: m",
        ),
        (
            label("  a#b: {model: n, format: llama, prices_usd_per_1m: {input: 1, output: 1}}"),
            "6: labels.a...: a label is named by 1 to 64 letters, digits or any of ._-, "
            "beginning with a letter or digit",
        ),
        *(
            (
                label().replace("model: m", f"model: '{model}'"),
                "3: labels.one.model: expected a Bedrock model id or inference-profile ARN, "
                f'found "{model if len(model) < 65 else "m" * 64 + "..."}"',
            )
            for model in ("", "a b", "a#b", "a?b", "a..b", "../a", "é", "/a", "a%3A", "m" * 2049)
        ),
    ],
)
def test_invalid_label_is_reported_with_line(text: str, problem: str) -> None:
    assert problems(text) == [f"config.yaml:{problem}"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            f"guardrails: {{prices_usd_per_1000_units: {{{UNITS}}}}}",
            "1: guardrails.prices_usd_per_1000_units.automated_reasoning: required, but missing",
        ),
        (
            f"guardrails:\n  prices_usd_per_1000_units:\n    {{{UNITS}, automated_reasoning: 0.0000000001}}",
            "3: guardrails.prices_usd_per_1000_units.automated_reasoning: "
            "expected at most nine decimals, found 0.0000000001",
        ),
        (
            f"guardrails: {{prices_usd_per_1000_units: {{{UNITS}, automated_reasoning: 2000000}}}}",
            "1: guardrails.prices_usd_per_1000_units.automated_reasoning: "
            "expected 0 to 1000000 USD for a thousand units, found 2000000",
        ),
        ("guardrails: {}", "1: guardrails.prices_usd_per_1000_units: required, but missing"),
    ],
)
def test_invalid_guardrail_prices_are_reported_with_line(text: str, problem: str) -> None:
    assert problems(text + LABELS) == [f"config.yaml:{problem}"]
