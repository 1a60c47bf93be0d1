"""What a call used, and what that costs: from bytes to tokens to pico-dollars, and the meter of one call.

Start with `meter`, then `usage_reader` (which reader a response gets), `model_families` (the one table of families),
`unit_usage` (what is sold by the piece) and `price_table` (what usage costs). Everything but `price_list_client`,
`price_updates`, `meter` and `meter_factory` is pure. May import: domain, errors, client_tls, clock, operations,
price_dimensions, config, provider_chain, stores.contract, telemetry, the upstream package, and ledger. Ledger and
upstream must not import it.
"""
