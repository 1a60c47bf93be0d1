"""An HTTP session for AWS services that checks the host name in their certificates, also through a proxy.

aiobotocore alone accepts any trusted certificate, whatever its name.
"""

from __future__ import annotations

from ssl import SSLContext

from aiobotocore.httpsession import AIOHTTPSession


class HostnameCheckingSession(AIOHTTPSession):  # type: ignore[misc]
    """aiobotocore takes any certificate that is trusted, whatever its name; and through a proxy, any at all."""

    def _get_ssl_context(self) -> SSLContext:
        context: SSLContext = super()._get_ssl_context()
        context.check_hostname = True
        return context

    def _setup_proxy_ssl_context(self, proxy_url: str) -> SSLContext:
        return super()._setup_proxy_ssl_context(proxy_url) or self._get_ssl_context()
