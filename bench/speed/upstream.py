"""The upstream in Bedrock's place: nginx with its answers ready, so that it is not the limit of what is measured."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.speed.machine import OTHER_CORE, needed, process, wait_until

# As large as those of a usual conversation: some words asked, some paragraphs answered.
QUESTION = json.dumps(
    {
        "system": [{"text": "You answer in plain words. " * 8}],
        "messages": [{"role": "user", "content": [{"text": "What is to be said about this? " * 40}]}],
        "inferenceConfig": {"maxTokens": 512, "temperature": 0.2},
    }
).encode()
ANSWER = json.dumps(
    {
        "metrics": {"latencyMs": 812},
        "output": {"message": {"role": "assistant", "content": [{"text": "An answer of some length. " * 138}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 41, "outputTokens": 83, "totalTokens": 124},
    },
    separators=(",", ":"),  # as Bedrock writes it
).encode()
REQUEST_ID = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


NGINX = """\
worker_processes 1;
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr crit;
worker_rlimit_nofile 16384;
events {{ worker_connections 12000; }}
http {{
  access_log off;
  server_tokens off;
  keepalive_requests 100000000;
  keepalive_timeout 600s;
  client_body_buffer_size 64k;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
{server}
}}
"""


@contextmanager
def nginx(folder: Path, core: int, server: str) -> Iterator[int]:
    """Its process id. Access logs are off, as they are here."""
    program = needed("nginx", "nginx-light")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, server=server))
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with process(command, core, folder=folder, output=folder / "out") as started:
        yield started.pid


@contextmanager
def bedrock(folder: Path, stream: bytes = b"") -> Iterator[tuple[int, int]]:
    """The ports, of HTTP/1.1 and of HTTP/2, of an upstream that gives one answer to everything, and `stream` to
    ConverseStream."""
    port, http2 = free_port(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream").write_bytes(stream)
    text = ANSWER.decode().replace("'", "\\'")
    server = f"""
  open_file_cache max=10;
  sendfile on;
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    listen 127.0.0.1:{http2} http2 backlog=4096;
    location / {{
      default_type application/json;
      add_header x-amzn-RequestId {REQUEST_ID};
      return 200 '{text}';
    }}
    location ~ /converse-stream$ {{
      error_page 405 =200 /stream;
      return 405;
    }}
    location = /stream {{
      internal;
      root {folder};
      default_type application/vnd.amazon.eventstream;
      add_header x-amzn-RequestId {REQUEST_ID};
    }}
  }}"""
    with nginx(folder, OTHER_CORE, server):
        wait_until(lambda: answers(port), "the upstream listens")
        yield port, http2
