"""Checks of the ports to listen on (free, or served by a running sidecar) and of the data port's certificate."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509

from price_keeper.config import Address
from price_keeper.doctor.doctor_checks import DoctorCheck, Finding, ok, skipped, trouble, warning
from price_keeper.doctor.doctor_context import DoctorContext
from price_keeper.doctor.network_probe import EndpointUnreachable, ProbeResponse, build_get_request, send_probe
from price_keeper.errors import ConfigError
from price_keeper.server.tls import create_server_context
from price_keeper.upstream.connection_pool import UpstreamEndpoint

RENEW_BEFORE = timedelta(days=30)
LOCAL_TIMEOUT_SECONDS = 1.5  # a server on this machine answers at once or not at all
_LISTENS: Final = "0A"  # the state of a listening socket in /proc/net/tcp
_OWN_COMMAND: Final = re.compile(r"\bprice(?:-keeper|_keeper\.cli) (?:serve|dev)\b")


def build_port_checks(context: DoctorContext) -> list[DoctorCheck]:
    listen = context.config.listen
    data = {"data": listen.data} if context.has_data_port else {}
    addresses: dict[str, Address | None] = {**data, "control": listen.control, "health": listen.health}
    return [
        DoctorCheck(f"{name} port", partial(_check_port, name, address))
        for name, address in addresses.items()
        if address is not None
    ]


async def _check_port(name: str, address: Address, context: DoctorContext) -> Finding:
    if address.port == 0:
        return ok(f"{address}: any free one")
    failure = _try_to_bind(address)
    if failure is None:
        return ok(f"{address} is free")
    key = f"listen.{name}"
    if failure.errno == errno.EADDRINUSE:
        return await _identify_listener(name, address, context)
    if failure.errno == errno.EACCES:
        return trouble(
            f"this user may not listen on {address}", f"set {key} to a port above 1023, or allow CAP_NET_BIND_SERVICE"
        )
    reason = os.strerror(failure.errno) if failure.errno else "no such host"
    return trouble(f"{address} cannot be listened on: {reason}", f"set {key} to an address of this machine")


def _try_to_bind(address: Address) -> OSError | None:
    """Bind the address and release it, without listening, so that no client can connect."""
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in addresses:
            with socket.socket(family, kind, protocol) as bound:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                bound.bind(where)
    except OSError as failure:
        return failure
    return None


async def _identify_listener(name: str, address: Address, context: DoctorContext) -> Finding:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)  # noqa: S104 - a client connects to it
    remedy = f"stop what has it (ss -ltnp 'sport = :{address.port}'), or set listen.{name} to another port"
    for is_tls in (False, True) if name == "data" else (False,):  # the running process may have another TLS setting
        endpoint = UpstreamEndpoint(host, address.port, is_tls)
        with suppress(EndpointUnreachable):
            response = await send_probe(
                endpoint,
                build_get_request(endpoint, "/health"),
                context.clock,
                _build_unverified_context(),
                LOCAL_TIMEOUT_SECONDS,
            )
            if _is_price_keeper(name, response):
                return ok(f"{address} is served by a sidecar that runs")
    owner = await asyncio.to_thread(_find_listening_process, address.port)
    if owner is not None and _OWN_COMMAND.search(owner.command):
        return trouble(
            f"{address} is taken by a sidecar that does not answer (process {owner.pid}: {owner.command})",
            f"look at its log; if it hangs, restart it: kill -9 {owner.pid} loses nothing that its journal has",
        )
    return trouble(f"{address} is taken by another program", remedy)


class _Process(NamedTuple):
    pid: int
    command: str


def _find_listening_process(port: int) -> _Process | None:
    """The process that listens on the port; None where the kernel does not tell, as of another user's."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and _read_port(row[1]) == port}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended, or belong to another user
            descriptors = process / "fd"
            if any(os.readlink(descriptors / each) in sockets for each in os.listdir(descriptors)):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return _Process(int(process.name), command)
    return None


def _read_port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _is_price_keeper(name: str, response: ProbeResponse) -> bool:
    if name == "data":  # the data port refuses an unknown operation with an error in AWS's form
        return 400 <= response.status < 500 and "x-amzn-errortype" in response.headers
    try:
        report = json.loads(response.body)
    except ValueError:
        return False
    return response.status == 200 and isinstance(report, dict) and report.get("status") == "ok"


def _build_unverified_context() -> ssl.SSLContext:
    """This request only identifies the server; `check_certificate` checks its certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_certificate(context: DoctorContext) -> Finding:
    tls = context.config.listen.tls
    if tls is None:
        return skipped("the data port speaks plain HTTP")
    remedy = "name a certificate with its chain in listen.tls.certificate_file, and its key in listen.tls.key_file"
    try:
        create_server_context(Path(tls.certificate_file), Path(tls.key_file))
        chain = x509.load_pem_x509_certificates(Path(tls.certificate_file).read_bytes())
    except ConfigError as failure:
        return trouble("; ".join(failure.problems), remedy)
    except (OSError, ValueError):
        return trouble(f"{tls.certificate_file} cannot be read", remedy)
    renew = f"renew it in {tls.certificate_file}, and restart the sidecar"
    return _judge_validity(chain, datetime.fromtimestamp(context.clock.now(), UTC), renew)


def _judge_validity(chain: list[x509.Certificate], now: datetime, renew: str) -> Finding:
    begins = max(each.not_valid_before_utc for each in chain)
    ends = min(each.not_valid_after_utc for each in chain)
    if ends <= now:
        return trouble(f"it expired on {ends:%Y-%m-%d}", renew)
    if begins > now:
        return trouble(f"it is not good before {begins:%Y-%m-%d %H:%M} UTC", f"{renew}; or set the clock right")
    message = f"matches its key, and is good until {ends:%Y-%m-%d}"
    return warning(message, renew) if ends - now < RENEW_BEFORE else ok(message)
