"""Every signature against the one that botocore, written by others, makes for the same request."""

from __future__ import annotations

import string
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from unittest.mock import patch
from urllib.parse import quote

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotocoreCredentials
from hypothesis import example, given, settings
from hypothesis import strategies as st
from price_keeper.operations import Operation, OperationPath
from price_keeper.upstream.sigv4 import AwsCredentials, Signer, canonicalize_query

from tests.support.effort import tries

DAY = 86_400
TODAY = 20_775 * DAY  # 2026-11-18
VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))

# botocore takes these out or makes something else of them; the rest of the names are its own or the signer's.
NOT_COMPARED = {
    *("expect", "transfer-encoding", "user-agent", "x-amzn-trace-id", "date", "x-amz-content-sha256"),
    *("host", "authorization", "x-amz-date", "x-amz-security-token"),
}

# Kept from example to example, as a running sidecar keeps its own, so that stale keys would be noticed.
SIGNERS: dict[tuple[str, str], Signer] = {}
KNOWN = [AwsCredentials("AKIDONE", "secret-one"), AwsCredentials("AKIDTWO", "secret+two/", "token" * 200)]


@contextmanager
def botocores_clock(at: float):
    with patch.object(botocore.auth, "get_current_datetime", lambda: datetime.fromtimestamp(int(at), UTC)):
        yield


def by_botocore(credentials, region, service, method, url, params, headers, body, at) -> dict[str, str]:
    request = AWSRequest(method=method, url=url, params=params, data=body)
    for name, value in headers:
        request.headers.add_header(name, value)
    keys = BotocoreCredentials(credentials.access_key, credentials.secret_key, credentials.token)
    with botocores_clock(at):
        botocore.auth.SigV4Auth(keys, service, region).add_auth(request)
    added = ("Authorization", "X-Amz-Date", "X-Amz-Security-Token")
    return {name.lower(): request.headers[name] for name in added if name in request.headers}


def by_us(credentials, region, service, method, path, query, host, headers, body, at) -> dict[str, str]:
    signer = SIGNERS.setdefault((region, service), Signer(region, service))
    lines = signer.sign(credentials, method, path, query, host, headers, sha256(body).hexdigest(), at).decode()
    assert lines.endswith("\r\n")
    return dict(line.split(": ", 1) for line in lines.split("\r\n")[:-1])


# ---------------------------------------------------------------- requests

visible_words = st.text(VISIBLE, min_size=1, max_size=40)
credentials = st.one_of(
    st.sampled_from(KNOWN),
    st.builds(AwsCredentials, visible_words, visible_words, st.one_of(st.none(), visible_words)),
)
regions = st.sampled_from(["us-east-1", "eu-central-1", "us-gov-west-1"])
services = st.sampled_from(["bedrock", "dynamodb"])
methods = st.sampled_from(["GET", "POST", "PUT", "DELETE"])
hosts = st.sampled_from(["bedrock-runtime.us-east-1.amazonaws.com", "127.0.0.1:8080", "[::1]:9000", "x.example"])
moments = st.builds(
    lambda day, second, fraction: max(0, TODAY + day * DAY + second + fraction),
    st.integers(-1, 1) | st.integers(-20_000, 20_000),
    st.sampled_from([-1, 0, 1]) | st.integers(0, DAY - 1),
    st.sampled_from([0, 0.5, 0.999]),
)

ids = st.sampled_from(
    [
        "premium",
        "anthropic.claude-sonnet-4-5-20250929-v1:0",
        "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-v2:1",
    ]
)
raw_segments = st.text(VISIBLE.translate({ord(c): None for c in "/?#"}), min_size=1, max_size=20)
unicode_segments = st.text(min_size=1, max_size=10).map(lambda text: quote(text, safe=""))
segments = st.one_of(raw_segments, unicode_segments, ids, ids.map(lambda some: quote(some, safe="")))
paths = st.one_of(
    st.builds(lambda operation, some: OperationPath(operation, some, "1").path, st.sampled_from(Operation), ids),
    st.builds(
        lambda several, end: "/" + "/".join(several) + end if several else "/",
        st.lists(segments.filter(lambda segment: segment not in (".", "..")), max_size=5),
        st.sampled_from(["", "/"]),
    ),
)

pairs = st.lists(st.tuples(st.text(min_size=1, max_size=8), st.text(max_size=8)), max_size=5)
bodies = st.binary(max_size=200)

header_names = st.text(string.ascii_lowercase + string.digits + "-_", min_size=1, max_size=12).filter(
    lambda name: name not in NOT_COMPARED
)
header_values = st.text(VISIBLE + "   ", max_size=30)
json_alone = st.just([("content-type", "application/json")])
headers = st.one_of(
    st.just([]),
    json_alone,
    header_values.map(lambda value: [("content-type", value)]),
    st.lists(
        st.tuples(st.one_of(header_names, st.sampled_from(["accept", "content-type", "x-amz-a", "z"])), header_values),
        max_size=6,
    ),
)


@settings(max_examples=tries(400))
@given(credentials, regions, services, methods, paths, hosts, headers, bodies, moments)
def test_paths_headers_and_bodies_are_signed_like_botocore(
    credentials, region, service, method, path, host, headers, body, at
):
    ours = by_us(credentials, region, service, method, path, "", host, headers, body, at)
    url = f"https://{host}{path}"
    assert ours == by_botocore(credentials, region, service, method, url, None, headers, body, at)


# Few of each, so that much of what is kept is used again: for the calls of a kind that come in one second.
NEAR_MIDNIGHT = [TODAY + shift for shift in (-1.0, -0.5, 0.0, 0.5, 1.0)]
kinds = st.tuples(
    st.sampled_from([KNOWN[0], AwsCredentials(KNOWN[0].access_key, KNOWN[0].secret_key), KNOWN[1]]),
    st.sampled_from(["POST", "GET"]),
    st.sampled_from(["/model/premium/converse", "/model/a%3Ab/invoke"]),
    st.sampled_from(["bedrock-runtime.us-east-1.amazonaws.com", "127.0.0.1:8080"]),
    st.sampled_from([[], [("content-type", "a/b")], [("content-type", "a  c")], [("x-amz-a", "1")]]),
    st.sampled_from([b"", b"{}"]),
    st.sampled_from(NEAR_MIDNIGHT),
)


@settings(max_examples=tries(60))
@given(st.lists(kinds, min_size=10, max_size=60))
def test_mixed_calls_in_any_order_are_signed_like_botocore(calls):
    signer = Signer("us-east-1")
    for credentials, method, path, host, headers, body, at in calls:
        lines = signer.sign(credentials, method, path, "", host, headers, sha256(body).hexdigest(), at).decode()
        ours = dict(line.split(": ", 1) for line in lines.split("\r\n")[:-1])
        url = f"https://{host}{path}"
        assert ours == by_botocore(credentials, "us-east-1", "bedrock", method, url, None, headers, body, at)


@settings(max_examples=tries(150))
@given(pairs, st.randoms(use_true_random=False), moments)
@example([("a", ""), ("a", "1"), ("a-", "0"), ("A", "é"), ("~", "a=b&c+d e/%")], None, TODAY)
def test_queries_are_signed_like_botocore(pairs, random, at):
    """However the client spells a query, it is signed as if botocore had been asked for the same."""
    path, host = "/async-invoke", "bedrock-runtime.us-east-1.amazonaws.com"
    query = "&".join(f"{spelled(name, random)}={spelled(value, random)}" for name, value in pairs)
    ours = by_us(KNOWN[0], "us-east-1", "bedrock", "GET", path, query, host, [], b"", at)
    url = f"https://{host}{path}"
    assert ours == by_botocore(KNOWN[0], "us-east-1", "bedrock", "GET", url, pairs, [], b"", at)
    sent = f"{url}?{canonicalize_query(query)}" if query else url
    assert ours == by_botocore(KNOWN[0], "us-east-1", "bedrock", "GET", sent, None, [], b"", at)


def spelled(text: str, random) -> str:
    """The same text, with more or less of it percent-encoded, in upper or lower case."""
    return "".join(_spelled_byte(byte, random) for byte in text.encode())


def _spelled_byte(byte: int, random) -> str:
    may_be_raw = chr(byte) in VISIBLE and chr(byte) not in "%&=#"
    if may_be_raw and (random is None or random.random() < 0.7):
        return chr(byte)
    return f"%{byte:02x}" if random is not None and random.random() < 0.3 else f"%{byte:02X}"


@settings(max_examples=tries(250))
@given(st.sampled_from(["method", "path", "query", "host", "value", "name"]), st.text(max_size=12))
def test_no_input_can_end_a_header_line(where, text):
    """Whatever is put wherever, either it is refused or it stays in its place."""
    headers = [("content-type", "x"), (text if where == "name" else "x-a", text if where == "value" else "x")]
    given_ = {"method": "GET", "path": "/", "query": "", "host": "h"} | {where: "/" + text if where == "path" else text}
    try:
        lines = Signer("us-east-1").sign(
            KNOWN[0], given_["method"], given_["path"], given_["query"], given_["host"], headers, "0" * 64, 0
        )
    except ValueError:
        return
    assert text.isascii()
    assert text.isprintable()
    assert lines.count(b"\n") == lines.count(b"\r\n") == 2
