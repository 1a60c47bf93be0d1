"""Format pico-dollars as dollars or micro-dollars: exact, or rounded for people. Pure."""

from __future__ import annotations

from price_keeper.domain import PICO_PER_MICRO, PICO_PER_USD, build_money_record, format_decimal

_DIGITS = 6


def format_usd(pico: int) -> str:
    """Dollars with six decimals, such as $1,234.000056. An amount above zero is never shown as zero."""
    micros = (pico + PICO_PER_MICRO // 2) // PICO_PER_MICRO
    if micros == 0 and pico > 0:
        return "<$0.000001"
    return f"${micros // 10**_DIGITS:,}.{micros % 10**_DIGITS:06}"


def format_exact_usd(pico: int) -> str:
    return format_decimal(pico, PICO_PER_USD)


def format_exact_micros(pico: int) -> str:
    return format_decimal(pico, PICO_PER_MICRO)


def build_text_record(name: str, pico: int | None) -> dict[str, int | str | None]:
    """Like `build_money_record`, for names that are exact strings themselves until 1.0 (decision 55)."""
    whole, exact = build_money_record(name, pico).values()
    return {name: exact, f"{name}_exact": exact, f"{name}_whole": whole}
