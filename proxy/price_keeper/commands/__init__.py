"""The commands of `price-keeper`, one file a group; `proxy/price_keeper/cli.py` puts them together."""
