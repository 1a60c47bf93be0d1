"""The commands of `price-keeper`, one file a group; `proxy/cli.py` puts them together."""
