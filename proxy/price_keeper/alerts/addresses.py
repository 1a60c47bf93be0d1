"""Which addresses a webhook may go to: those of the public internet, however they are written. Pure.

The lists are our own, since those of Python's `ipaddress` differ from one version to the next.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this host
            "10.0.0.0/8",
            "100.64.0.0/10",  # carriers' own, and metadata in some clouds
            "127.0.0.0/8",
            "168.63.129.16/32",  # public by its form, but it is Azure's metadata
            "169.254.0.0/16",  # link-local, and most clouds' metadata
            "172.16.0.0/12",
            "192.0.0.0/24",  # protocols, and Oracle's metadata
            "192.0.2.0/24",
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")))  # Teredo is in the first
_IPV4_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")


def is_public_address(address: str) -> bool:
    """What is no address is not public."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return _is_public_v6(parsed) if isinstance(parsed, IPv6Address) else _is_public_v4(parsed)


def _is_public_v6(address: IPv6Address) -> bool:
    embedded = _extract_ipv4(address)
    if embedded is not None:
        return _is_public_v4(embedded)
    return address in _GLOBAL_UNICAST and not any(address in network for network in _NOT_PUBLIC_V6)


def _is_public_v4(address: IPv4Address) -> bool:
    return not any(address in network for network in _NOT_PUBLIC_V4)


def _extract_ipv4(address: IPv6Address) -> IPv4Address | None:
    """Where packets to the address really go, if it only wraps an older one."""
    if address in _IPV4_MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return IPv4Address(int(address) >> 80 & 0xFFFFFFFF) if address in _6TO4 else None
