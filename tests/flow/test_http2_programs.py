"""Clients that others wrote, over HTTP/2: nghttp, h2load, curl, Node's http2 and Go's net/http. One that is not
installed is skipped by name; Debian has them as nghttp2-client, curl, nodejs and golang-go."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from price_keeper.server.tls import create_server_context, ensure_local_certificates

from tests.support.port_harness import PortHarness, echo, on_both_loops, open_port

SECONDS = 60
BODY = b"0123456789" * 30_000  # several windows of 64 kB


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


async def output_of(*command: str, folder: Path) -> str:
    """In a folder of its own, with nothing of this process's proxies."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    started = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(SECONDS):
        said, _ = await started.communicate()
    assert started.returncode == 0, said.decode()
    return said.decode()


def url(rig: PortHarness, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{rig.port}/a"


@on_both_loops
async def test_nghttp_gets_its_body_back(tmp_path: Path) -> None:
    nghttp = needed("nghttp")
    (tmp_path / "body").write_bytes(BODY)
    async with open_port(echo) as rig:
        said = await output_of(nghttp, "-v", "--data=body", url(rig), folder=tmp_path)
        assert "recv (stream_id=13) :status: 200" in said
        assert said.count("[ERROR]") == 0
        assert sum(map(int, re.findall(r"recv DATA frame <length=(\d+)", said))) == len(BODY)
        assert re.search(r"recv DATA frame .*\n\s+; END_STREAM", said)


@on_both_loops
async def test_h2load_has_all_its_requests_answered(tmp_path: Path) -> None:
    h2load = needed("h2load")
    (tmp_path / "body").write_bytes(BODY[:2000])
    async with open_port(echo) as rig:
        for connections, streams in ((1, 100), (20, 1), (5, 50)):
            options = [f"-c{connections}", f"-m{streams}", "-n2000", "-d", "body"]
            said = await output_of(h2load, *options, url(rig), folder=tmp_path)
            assert "2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout" in said
            assert "status codes: 2000 2xx" in said


@on_both_loops
async def test_curl_gets_its_body_back(tmp_path: Path) -> None:
    curl = needed("curl")
    (tmp_path / "body").write_bytes(BODY)
    async with open_port(echo) as rig:
        told = ["-sS", "--http2-prior-knowledge", "-H", "Expect:", "--data-binary", "@body", "-w", " %{http_version}"]
        assert await output_of(curl, *told, url(rig), folder=tmp_path) == BODY.decode() + " 2"
        head = await output_of(curl, "-sSI", "--http2-prior-knowledge", url(rig), folder=tmp_path)
        assert head.startswith("HTTP/2 200")
        assert "method: HEAD" in head


NODE = """
import http2 from "node:http2";
const [, , url, size] = process.argv;
const body = Buffer.alloc(Number(size), "0123456789");
const call = (client) =>
  new Promise((done, failed) => {
    const request = client.request({ ":method": "POST", ":path": "/a" });
    const parts = [];
    request.on("error", failed).on("data", (part) => parts.push(part));
    request.on("end", () => done(Buffer.concat(parts).equals(body)));
    request.end(body);
  });
const options = process.argv[4] ? { ca: (await import("node:fs")).readFileSync(process.argv[4]) } : {};
const connect = () => http2.connect(url, options);
const kept = connect();
const whole = await Promise.all(Array.from({ length: 50 }, () => call(kept)));
kept.close();
const fresh = await Promise.all(
  Array.from({ length: 50 }, async () => {
    const client = connect();
    const isWhole = await call(client);
    await new Promise((closed) => client.close(closed));
    return isWhole;
  }),
);
const cancelling = connect();
const cancelled = cancelling.request({ ":method": "POST", ":path": "/a" });
cancelled.on("error", () => {});
cancelled.close(http2.constants.NGHTTP2_CANCEL);
const after = await call(cancelling);
cancelling.close();
console.log(JSON.stringify({ whole: whole.filter(Boolean).length, fresh: fresh.filter(Boolean).length, after }));
"""


@pytest.mark.parametrize("scheme", ["http", "https"])
@on_both_loops
async def test_node_gets_every_body_back(scheme: str, tmp_path: Path) -> None:
    """On one connection, on a new one for each call, and after a call that it cancelled."""
    node = needed("node")
    (tmp_path / "calls.mjs").write_text(NODE)
    authority, certificate, key = ensure_local_certificates(tmp_path, time.time())
    tls = create_server_context(certificate, key) if scheme == "https" else None
    async with open_port(echo, tls=tls) as rig:
        trusted = [str(authority)] if tls else []
        target = f"{scheme}://127.0.0.1:{rig.port}"
        said = await output_of(node, "calls.mjs", target, "100000", *trusted, folder=tmp_path)
        assert json.loads(said) == {"whole": 50, "fresh": 50, "after": True}


GO = """
package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
)

func main() {
	pem, _ := os.ReadFile(os.Args[2])
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	trust := &tls.Config{RootCAs: pool}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: trust, ForceAttemptHTTP2: true}}
	body := bytes.Repeat([]byte("0123456789"), 30000)
	var all sync.WaitGroup
	whole := make(chan bool, 50)
	for i := 0; i < 50; i++ {
		all.Add(1)
		go func() {
			defer all.Done()
			answer, err := client.Post(os.Args[1], "text/plain", bytes.NewReader(body))
			if err != nil {
				fmt.Println(err)
				return
			}
			got, err := io.ReadAll(answer.Body)
			whole <- err == nil && answer.ProtoMajor == 2 && bytes.Equal(got, body)
		}()
	}
	all.Wait()
	close(whole)
	count := 0
	for is := range whole {
		if is {
			count++
		}
	}
	fmt.Println(count)
}
"""


async def test_go_gets_every_body_back_over_tls(tmp_path: Path) -> None:
    go = needed("go")
    (tmp_path / "calls.go").write_text(GO)
    await output_of(go, "build", "-o", "calls", "calls.go", folder=tmp_path)
    authority, certificate, key = ensure_local_certificates(tmp_path, time.time())
    async with open_port(echo, tls=create_server_context(certificate, key)) as rig:
        said = await output_of("./calls", url(rig, "https"), str(authority), folder=tmp_path)
        assert said == "50\n"
