"""Format pico-dollars as dollars or micro-dollars: exact, or rounded for people. Pure."""

from __future__ import annotations

from price_keeper.domain import PICO_PER_MICRO, PICO_PER_USD

_DIGITS = 6


def format_usd(pico: int) -> str:
    """Dollars with six decimals, such as $1,234.000056. An amount above zero is never shown as zero."""
    micros = (pico + PICO_PER_MICRO // 2) // PICO_PER_MICRO
    if micros == 0 and pico > 0:
        return "<$0.000001"
    return f"${micros // 10**_DIGITS:,}.{micros % 10**_DIGITS:06}"


def format_exact_usd(pico: int) -> str:
    return _format_decimal(pico, PICO_PER_USD)


def format_exact_micros(pico: int) -> str:
    return _format_decimal(pico, PICO_PER_MICRO)


def build_record(name: str, pico: int | None) -> dict[str, int | str | None]:
    """An amount in JSON: whole micro-dollars, rounded down, with the exact figure beside it."""
    if pico is None:
        return {name: None, f"{name}_exact": None}
    return {name: pico // PICO_PER_MICRO, f"{name}_exact": format_exact_micros(pico)}


def build_text_record(name: str, pico: int | None) -> dict[str, int | str | None]:
    """The same for names that were exact figures in strings first, and stay so until 1.0 (decision 55)."""
    whole, exact = build_record(name, pico).values()
    return {name: exact, f"{name}_exact": exact, f"{name}_whole": whole}


def _format_decimal(number: int, unit: int) -> str:
    """An exact decimal without an exponent and without trailing zeros."""
    whole, part = divmod(number, unit)
    if not part:
        return str(whole)
    return f"{whole}.{part:0{len(str(unit)) - 1}}".rstrip("0")
