"""What is compared: no proxy, nginx, Envoy, a plain aiohttp proxy, Portkey, LiteLLM, and this sidecar."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from uuid import uuid4

from price_keeper.auth.signing_keys import load_keys
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock, SystemClock
from price_keeper.config import parse_config
from price_keeper.stores import schema
from price_keeper.stores.contract import Put, Value
from price_keeper.stores.sqlite import SqliteStore

from bench.speed.machine import PROXY_CORE, CannotMeasure, found, process, wait_until
from bench.speed.upstream import QUESTION, free_port, nginx

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".venv" / "bench"  # what the comparison alone needs
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
    pid: int | None = None  # of the process that does the work; none without a proxy
    prefix: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    http2_port: int | None = None
    translated: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)  # where it speaks OpenAI's API

    def call(self, path: str) -> tuple[str, bytes]:
        """The path and the body by which it is asked for what Bedrock has at `path`."""
        return self.translated.get(path, (self.prefix + path, QUESTION))


@dataclass(frozen=True)
class Contender:
    name: str
    title: str
    start: Callable[[Path, int], AbstractContextManager[Running]]  # in a folder, before the upstream at a port
    is_ours: bool = False
    is_older: bool = False  # of us: measured over HTTP/2 alone
    keeps_frames: bool = True  # it passes a stream's frames on as they are


@contextmanager
def _no_proxy(_: Path, upstream: int) -> Iterator[Running]:
    yield Running(upstream)


@contextmanager
def _started(name: str, command: Sequence[str], folder: Path, running: Running, **more: str) -> Iterator[Running]:
    """One that answers, asked until it does. `more` is its environment."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder), **more}
    with process(command, PROXY_CORE, folder=folder, environment=variables, output=folder / "out") as started:
        wait_until(lambda: started.poll() is not None or _serves(running), f"{name} answers")
        if started.poll() is not None:
            raise CannotMeasure(f"{name} ended: {(folder / 'out').read_text()[-300:]}")
        yield replace(running, pid=started.pid)


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
        running = Running(port, pid, http2_port=http2)
        wait_until(lambda: _serves(running), "nginx answers")
        yield running


# ---------------------------------------------------------------- Envoy

ENVOY = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {types}.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: data
          stream_idle_timeout: 0s
          route_config:
            virtual_hosts:
            - name: bedrock
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                route: {{cluster: bedrock, timeout: 0s}}
          http_filters:
          - name: envoy.filters.http.aws_request_signing
            typed_config:
              "@type": {types}.filters.http.aws_request_signing.v3.AwsRequestSigning
              service_name: bedrock
              region: us-east-1
              credential_provider:
                inline_credential: {{access_key_id: AKIDEXAMPLE, secret_access_key: an-example}}
          - name: envoy.filters.http.router
            typed_config:
              "@type": {types}.filters.http.router.v3.Router
  clusters:
  - name: bedrock
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: bedrock
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}
"""


def envoy_program() -> Path | None:
    return next(BENCH.glob("lib/python*/site-packages/envoy/_bin/envoy"), None)


@contextmanager
def _envoy(folder: Path, upstream: int) -> Iterator[Running]:
    program = envoy_program()
    if program is None:
        raise CannotMeasure("Envoy is not installed: make .venv/.bench")
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    types = "type.googleapis.com/envoy.extensions"
    (folder / "envoy.yaml").write_text(ENVOY.format(port=port, upstream=upstream, types=types))
    options = ["--concurrency", "1", "--disable-hot-restart", "-l", "error"]
    with _started(
        "Envoy", [str(program), "-c", "envoy.yaml", *options], folder, Running(port, http2_port=port)
    ) as running:
        yield running


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
    with _started("the plain proxy", command, folder, Running(port)) as running:
        yield running


# ---------------------------------------------------------------- Portkey


def portkey_program() -> Path:
    return BENCH / "gateways" / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"


@contextmanager
def _portkey(folder: Path, upstream: int) -> Iterator[Running]:
    """By OpenAI's chat completions, which it translates to Converse: in the release that is pinned, Bedrock's own
    paths fail under Node ("immutable"). Headers of each call name the provider and its keys."""
    program, node = portkey_program(), found("node")
    if node is None or not program.exists():
        raise CannotMeasure("Portkey is not installed: it needs node and npm; make .venv/.bench")
    port = free_port()
    headers = {
        "x-portkey-provider": "bedrock",
        "x-portkey-custom-host": f"http://127.0.0.1:{upstream}",
        "x-portkey-aws-access-key-id": "AKIDEXAMPLE",
        "x-portkey-aws-secret-access-key": "an-example",
        "x-portkey-aws-region": "us-east-1",
    }
    path = "/v1/chat/completions"
    translated = {UNARY: (path, _as_openai()), STREAMING: (path, _as_openai(stream=True))}
    command = [node, str(program), f"--port={port}", "--headless"]
    running = Running(port, headers=headers, translated=translated)
    with _started("Portkey", command, folder, running, NODE_ENV="production") as served:
        yield served


def _as_openai(**more: object) -> bytes:
    """The question in OpenAI's words."""
    bedrock = json.loads(QUESTION)
    said = [("system", bedrock["system"]), *((each["role"], each["content"]) for each in bedrock["messages"])]
    messages = [{"role": role, "content": content[0]["text"]} for role, content in said]
    inference = bedrock["inferenceConfig"]
    limits = {"max_tokens": inference["maxTokens"], "temperature": inference["temperature"]}
    return json.dumps({"model": LABEL, "messages": messages, **limits, **more}).encode()


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
    return BENCH / "bin" / "litellm"


@contextmanager
def _litellm(folder: Path, upstream: int) -> Iterator[Running]:
    program = litellm_program()
    if not program.exists():
        raise CannotMeasure("LiteLLM is not installed: make .venv/.bench")
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(LITELLM.format(label=LABEL, model=MODEL))
    variables = {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "an-example",
        "AWS_REGION_NAME": "us-east-1",
        "AWS_BEDROCK_RUNTIME_ENDPOINT": f"http://127.0.0.1:{upstream}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
    }
    command = [str(program), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    running = Running(port, prefix="/bedrock", headers={"authorization": "Bearer sk-benchmark"})
    with _started("LiteLLM", command, folder, running, **variables) as served:
        yield served


# ---------------------------------------------------------------- this sidecar

# With prices, since nothing of this leaves the machine: AWS's price list is not asked.
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


def configured(folder: Path, upstream: int, store: str = SQLITE, *, asks_prices: bool = False) -> Running:
    """A folder in which a sidecar can be started, and where it will answer. With `asks_prices` it follows AWS's price
    list, as it does by default."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    text = keeper_config(folder, upstream, port, free_port(), store)
    if asks_prices:
        text = text.replace("    price_source: config\n", "")
    (folder / "config.yaml").write_text(text)
    return Running(port, None, "", {"authorization": f"Bearer {token(text)}"}, http2_port=port)


def environment(folder: Path, program: Sequence[str] = FROM_SOURCES) -> dict[str, str]:
    """An installed program is not to find the sources beside it. Nothing leaves the machine: AWS is behind a proxy that
    refuses."""
    path = {"PYTHONPATH": str(ROOT)} if program is FROM_SOURCES else {}
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "HTTPS_PROXY": "http://127.0.0.1:9", **path, **KEEPER}


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


def installed(environment: Path) -> Sequence[str]:
    """The sidecar of a virtual environment."""
    program = environment / "bin" / "price-keeper"
    if not program.exists():
        raise CannotMeasure(f"there is none in {environment.name}: make compiled, which needs a C compiler")
    return [str(program)]


COMPILED = ROOT / ".venv" / "compiled"


@contextmanager
def _compiled(folder: Path, upstream: int) -> Iterator[Running]:
    with keeper(folder, upstream, program=installed(COMPILED)) as running:
        yield running


def question(running: Running, path: str = UNARY, body: bytes | None = None, headers: Mapping[str, str] = {}) -> bytes:
    """A whole request, as bytes for a socket."""
    address, own = running.call(path)
    body = own if body is None else body
    lines = {
        "host": f"127.0.0.1:{running.port}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **running.headers,
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {address} HTTP/1.1\r\n{head}\r\n".encode() + body


def new_invocation() -> str:
    return str(uuid4())


def sdk_headers(invocation: str = "") -> dict[str, str]:
    """What botocore sends with a call. Each call has an id of its own, under which the SDK would repeat it."""
    return {
        "amz-sdk-invocation-id": invocation or new_invocation(),
        "amz-sdk-request": "attempt=1",
        "user-agent": "Boto3/1.40.61 md/Botocore#1.40.61 ua/2.1 os/linux#6.8.0 md/arch#x86_64 lang/python#3.11.7 "
        "md/pyimpl#CPython m/Z,b,D,n cfg/retry-mode#standard Botocore/1.40.61",
        "accept": "application/json",
        "x-amz-date": "20261119T000000Z",
        "accept-encoding": "identity",
    }


def _serves(running: Running) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", running.port), 10) as asked:
            asked.sendall(question(running))
            return asked.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


DIRECT = Contender("direct", "no proxy", _no_proxy)
NGINX = Contender("nginx", "nginx", _nginx)
ENVOY_SIGNING = Contender("envoy", "Envoy with SigV4", _envoy)
AIOHTTP = Contender("aiohttp", "a plain aiohttp proxy", _aiohttp)
PORTKEY = Contender("portkey", "Portkey", _portkey, keeps_frames=False)
LITELLM_PROXY = Contender("litellm", "LiteLLM pass-through", _litellm)
KEEPER_ON = Contender("keeper", "Price Keeper, everything on", _keeper, is_ours=True)
KEEPER_COMPILED = Contender("compiled", "Price Keeper, compiled", _compiled, is_ours=True)
ALL = (DIRECT, NGINX, ENVOY_SIGNING, AIOHTTP, PORTKEY, LITELLM_PROXY, KEEPER_ON, KEEPER_COMPILED)


def older(checkout: Path) -> list[Contender]:
    """An older version of this, in its own virtual environments; the compiled build if there is one."""
    builds = [("older", "an older version", checkout / ".venv")]
    if (checkout / ".venv" / "compiled").exists():
        builds.append(("older-compiled", "an older version, compiled", checkout / ".venv" / "compiled"))
    return [
        Contender(
            name,
            title,
            lambda folder, upstream, environment=environment: keeper(  # type: ignore[misc]
                folder, upstream, program=installed(environment)
            ),
            is_ours=True,
            is_older=True,
        )
        for name, title, environment in builds
    ]
