"""The commands of `price-keeper`, one file a group; `proxy/price_keeper/cli/entry_point.py` puts them together."""
