"""What is compared: nobody between, nginx, a plain proxy, LiteLLM, and this sidecar with everything on."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import parse_config
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value
from price_keeper.stores.sqlite import SqliteStore

from bench.speed.machine import PROXY_CORE, CannotMeasure, process, wait_until
from bench.speed.upstream import QUESTION, answers, free_port, nginx

ROOT = Path(__file__).parents[2]
ORG = "550e8400-e29b-41d4-a716-446655440000"
LABEL = "premium"
MODEL = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
SECRET = "a-secret-of-the-benchmark-that-is-long-enough-to-sign-with"
AMPLE = 10**15  # so that it never says no: what is measured is the deciding
UNARY = f"/model/{LABEL}/converse"
STREAMING = f"/model/{LABEL}/converse-stream"


@dataclass(frozen=True)
class Running:
    """A contender that answers."""

    port: int
    pid: int | None = None  # of the process that does the work; nobody between has none
    prefix: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    http2_port: int | None = None

    def url(self, path: str, *, http2: bool = False) -> str:
        return f"http://127.0.0.1:{self.http2_port if http2 else self.port}{self.prefix}{path}"


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    start: Callable[[Path, int], AbstractContextManager[Running]]  # in a folder, before the upstream at a port


@contextmanager
def _nobody(_: Path, upstream: int) -> Iterator[Running]:
    yield Running(upstream)


# ---------------------------------------------------------------- nginx


@contextmanager
def _nginx(folder: Path, upstream: int) -> Iterator[Running]:
    port, http2 = free_port(), free_port()
    server = f"""
  upstream bedrock {{
    server 127.0.0.1:{upstream};
    keepalive 6000;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    listen 127.0.0.1:{http2} http2 backlog=4096;
    location / {{
      proxy_pass http://bedrock;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
    }}
  }}"""
    with nginx(folder, PROXY_CORE, server) as pid:
        wait_until(lambda: answers(port), "nginx listens")
        yield Running(port, pid, http2_port=http2)


# ---------------------------------------------------------------- a plain proxy

PLAIN = """
import sys
import aiohttp
from aiohttp import web

HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "upgrade"}


async def handle(request):
    headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
    url = request.app["upstream"] + request.raw_path
    async with request.app["session"].request(
        request.method, url, headers=headers, data=await request.read()
    ) as answer:
        back = web.StreamResponse(status=answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in HOP:
                back.headers[name] = value
        await back.prepare(request)
        async for chunk in answer.content.iter_any():
            await back.write(chunk)
        await back.write_eof()
        return back


async def made(upstream):
    app = web.Application(client_max_size=2**25)
    app["upstream"] = upstream
    app["session"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
    app.router.add_route("*", "/{path:.*}", handle)
    return app

web.run_app(made(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""


@contextmanager
def _aiohttp(folder: Path, upstream: int) -> Iterator[Running]:
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.py").write_text(PLAIN)
    command = [sys.executable, str(folder / "plain.py"), str(port), f"http://127.0.0.1:{upstream}"]
    with process(command, PROXY_CORE, output=folder / "out") as started:
        wait_until(lambda: answers(port), "the plain proxy listens")
        yield Running(port, started.pid)


# ---------------------------------------------------------------- LiteLLM

LITELLM = """\
model_list:
  - model_name: {label}
    litellm_params:
      model: bedrock/{model}
      aws_region_name: us-east-1
general_settings:
  master_key: sk-benchmark
litellm_settings:
  telemetry: false
"""


def litellm_program() -> Path:
    return ROOT / ".venv" / "bench" / "bin" / "litellm"


@contextmanager
def _litellm(folder: Path, upstream: int) -> Iterator[Running]:
    program = litellm_program()
    if not program.exists():
        raise CannotMeasure("LiteLLM is not installed: make .venv/.bench")
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(LITELLM.format(label=LABEL, model=MODEL))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "an-example",
        "AWS_REGION_NAME": "us-east-1",
        "AWS_BEDROCK_RUNTIME_ENDPOINT": f"http://127.0.0.1:{upstream}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }
    command = [str(program), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with process(command, PROXY_CORE, folder=folder, environment=environment, output=folder / "out") as started:
        running = Running(port, started.pid, "/bedrock", {"authorization": "Bearer sk-benchmark"})
        wait_until(lambda: started.poll() is not None or _serves(running), "LiteLLM answers")
        if started.poll() is not None:
            raise CannotMeasure(f"LiteLLM ended: {(folder / 'out').read_text()[-300:]}")
        yield running


# ---------------------------------------------------------------- this

# Prices stand there, since nothing of this leaves the machine: AWS's price list is not asked.
OURS = """\
listen:
  data: 127.0.0.1:{port}
  control: 127.0.0.1:{control}
upstream:
  endpoint: http://127.0.0.1:{upstream}
store:
{store}
journal:
  dir: {folder}/journal
  max_unflushed_usd: 1000000
labels:
  premium:
    model: {model}
    format: anthropic
    price_source: config
    prices_usd_per_1m: {{input: 3.00, output: 15.00, cache_read: 0.30, cache_write_5m: 3.75, cache_write_1h: 6.00}}
  standard:
    model: amazon.nova-lite-v1:0
    format: nova
    price_source: config
    prices_usd_per_1m: {{input: 0.06, output: 0.24, cache_read: 0.015, cache_write_5m: 0}}
"""
FROM_SOURCES = (sys.executable, "-m", "price_keeper.cli")
SQLITE = "  engine: sqlite\n  path: {folder}/store.db"
KEEPER = {"PRICE_KEEPER_JWT_SECRET": SECRET, "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "an-example"}


def everything_on() -> dict[str, Value]:
    """What an org has that uses all there is: a chain with quotas, and limits of requests and tokens."""
    return {
        "org_name": "benchmark",
        "timezone": "UTC",
        "model_ordering": [LABEL, "standard"],
        "quotas": {LABEL: AMPLE, "standard": AMPLE},
        "limits": {"rpm": 100_000_000, "tpm": 1_000_000_000},
    }


async def prepared(path: Path) -> None:
    store = await SqliteStore(path, SystemClock().now).open()
    try:
        await store.put(Put(schema.org_config_key(ORG), everything_on()))
    finally:
        await store.close()


def token(config_text: str, app: str = "shop", clock: Clock | None = None) -> str:
    """`clock` is the sidecar's, if that is not this machine's: it takes no token of its future."""
    config = parse_config(config_text, "the benchmark's", {})
    clock = clock or SystemClock()
    tokens = TokenService(load_keys(config.auth.keys, KEEPER), config.auth.issuer, clock.now)
    return tokens.mint_access(ORG, app, 24 * 3600).token


def keeper_config(folder: Path, upstream: int, port: int, control: int, store: str = SQLITE) -> str:
    engine = store.format(folder=folder)
    return OURS.format(port=port, control=control, upstream=upstream, store=engine, folder=folder, model=MODEL)


def configured(folder: Path, upstream: int, store: str = SQLITE) -> Running:
    """A folder in which a sidecar can be started, and where it will answer."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    text = keeper_config(folder, upstream, port, free_port(), store)
    (folder / "config.yaml").write_text(text)
    return Running(port, None, "", {"authorization": f"Bearer {token(text)}"}, http2_port=port)


def environment(folder: Path, program: Sequence[str] = FROM_SOURCES) -> dict[str, str]:
    """An installed program is not to find the sources beside it."""
    path = {"PYTHONPATH": str(ROOT)} if program is FROM_SOURCES else {}
    return {"PATH": os.environ["PATH"], "HOME": str(folder), **path, **KEEPER}


@contextmanager
def serving(
    folder: Path,
    running: Running,
    *options: str,
    core: int | Sequence[int] = PROXY_CORE,
    pause: float = 0.01,
    program: Sequence[str] = FROM_SOURCES,
) -> Iterator[Running]:
    """What was configured there, started and asked until it answers."""
    command = [*program, "serve", "--config", "config.yaml", *options]
    with process(
        command, core, folder=folder, environment=environment(folder, program), output=folder / "out"
    ) as started:
        wait_until(lambda: started.poll() is not None or _serves(running), "the sidecar answers", pause=pause)
        if started.poll() is not None:
            raise CannotMeasure(f"the sidecar ended: {(folder / 'out').read_text()[-500:]}")
        yield replace(running, pid=started.pid)


@contextmanager
def keeper(
    folder: Path,
    upstream: int,
    *options: str,
    core: int | Sequence[int] = PROXY_CORE,
    program: Sequence[str] = FROM_SOURCES,
) -> Iterator[Running]:
    running = configured(folder, upstream)
    asyncio.run(prepared(folder / "store.db"))
    with serving(folder, running, *options, core=core, program=program) as served:
        yield served


@contextmanager
def _keeper(folder: Path, upstream: int) -> Iterator[Running]:
    with keeper(folder, upstream) as running:
        yield running


@contextmanager
def _compiled(folder: Path, upstream: int) -> Iterator[Running]:
    program = ROOT / ".venv" / "compiled" / "bin" / "price-keeper"
    if not program.exists():
        raise CannotMeasure("there is no compiled build: make compiled, which needs a C compiler")
    with keeper(folder, upstream, program=[str(program)]) as running:
        yield running


def question(running: Running, path: str = UNARY, body: bytes = QUESTION) -> bytes:
    """A whole request, as bytes for a socket."""
    lines = {
        "host": f"127.0.0.1:{running.port}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **running.headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {running.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode() + body


def _serves(running: Running) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", running.port), 10) as asked:
            asked.sendall(question(running))
            return asked.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


DIRECT = Contender("direct", "nobody between", _nobody)
NGINX = Contender("nginx", "nginx", _nginx)
AIOHTTP = Contender("aiohttp", "a plain aiohttp proxy", _aiohttp)
LITELLM_PROXY = Contender("litellm", "LiteLLM pass-through", _litellm)
KEEPER_ON = Contender("keeper", "Price Keeper, everything on", _keeper)
KEEPER_COMPILED = Contender("compiled", "Price Keeper, compiled", _compiled)
ALL = (DIRECT, NGINX, AIOHTTP, LITELLM_PROXY, KEEPER_ON, KEEPER_COMPILED)

__all__ = ["ALL", "Contender", "Running"]
