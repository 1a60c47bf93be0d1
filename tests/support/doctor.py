"""A patient for the doctor, and servers that have something to be found."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from price_keeper.app import Role
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import Config
from price_keeper.config.config_sections import parse_config
from price_keeper.doctor.check_list import build_checks
from price_keeper.doctor.doctor_checks import Finding, run_doctor_checks
from price_keeper.doctor.doctor_context import DoctorContext

CONFIG = """
labels:
  economy: {model: amazon.nova-lite-v1:0, format: nova, prices_usd_per_1m: {input: 0.06, output: 0.24}}
"""


def write_config(folder: Path, **sections: Mapping[str, Any]) -> Config:
    """Simulated and on SQLite, with everything in the folder, but for what the sections say."""
    config = parse_config(CONFIG, "config.yaml", {})
    usual: dict[str, Mapping[str, Any]] = {
        "upstream": {"endpoint": "simulated"},
        "store": {"path": str(folder / "data" / "price-keeper.db")},
        "journal": {"dir": str(folder / "data" / "journal")},
    }
    merged = {name: {**usual.get(name, {}), **sections.get(name, {})} for name in usual.keys() | sections.keys()}
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in merged.items()}
    return dataclasses.replace(config, **changed)


def store_path(config: Config) -> Path:
    return Path(config.store.path)


def journal_of(config: Config) -> Path:
    folder = Path(config.journal.dir)
    folder.mkdir(parents=True)
    return folder


async def run_checks(
    config: Config,
    environ: Mapping[str, str] | None = None,
    *,
    clock: Clock | None = None,
    only: str = "",
    role: Role = "both",
) -> dict[str, Finding]:
    patient = DoctorContext(config, environ or {}, clock or SystemClock(), " --config config.yaml", role)
    try:
        checks = [check for check in build_checks(patient) if only in check.name]
        assert checks, only
        return dict(await run_doctor_checks(checks, patient))
    finally:
        await patient.close()


async def run_check(
    name: str,
    config: Config,
    environ: Mapping[str, str] | None = None,
    *,
    clock: Clock | None = None,
    role: Role = "both",
) -> Finding:
    return (await run_checks(config, environ, clock=clock, only=name, role=role))[name]


@asynccontextmanager
async def run_constant_server(
    headers: Mapping[str, str], status: int = 404, body: bytes = b"{}", tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server that answers everything alike, or, with a status of 0, nothing; its port."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} Planned\r\n{lines}Content-Length: {len(body)}\r\n\r\n".encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            if status:
                writer.write(head + body)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]
