"""TLS of this process's own connections to other servers.

Reading the certificates of the authorities that the system trusts takes 20 ms. They are read once, when the first
connection needs them; aiohttp by itself reads them twice, whenever it is imported.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def get_client_context() -> ssl.SSLContext:
    """The context for connections to other servers: trusts the system's authorities and checks host names.

    It is shared, so it must not be changed.
    """
    return ssl.create_default_context()


@contextmanager
def skip_default_authorities() -> Iterator[None]:
    """Let no context read the system's authorities in this block, in which aiohttp is imported.

    aiohttp's own default contexts then trust no server, so each of its connectors for HTTPS must be given a context.
    """
    ssl.SSLContext.set_default_verify_paths = _read_nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ssl.SSLContext.set_default_verify_paths  # what it inherits from C


def _read_nothing(self: ssl.SSLContext) -> None:
    pass
