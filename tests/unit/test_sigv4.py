"""Signatures against botocore's, and what is never signed."""

from __future__ import annotations

import dataclasses
import re
import string
from datetime import UTC, datetime
from hashlib import sha256

import pytest
from price_keeper.operations import parse_path
from price_keeper.upstream.sigv4 import AwsCredentials, Signer, canonicalize_query

SUITE = AwsCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
SUITE_TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx7"
    "mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q6d"
    "+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
SUITE_AT = datetime(2015, 8, 30, 12, 36, tzinfo=UTC).timestamp()
MIDNIGHT = datetime(2026, 11, 19, tzinfo=UTC).timestamp()
UNRESERVED = "-._~" + string.digits + string.ascii_uppercase + string.ascii_lowercase
FORM = "application/x-www-form-urlencoded"
JSON = [("content-type", "application/json")]
NOTHING = sha256(b"").hexdigest()


def signature_of(lines: bytes) -> str:
    return re.search(rb"Signature=([0-9a-f]{64})\r\n", lines).group(1).decode()


def signed(
    signer: Signer | None = None,
    credentials: AwsCredentials = SUITE,
    method: str = "POST",
    path: str = "/model/premium/converse",
    query: str = "",
    host: str = "bedrock-runtime.us-east-1.amazonaws.com",
    headers: list[tuple[str, str]] = JSON,
    body_sha256: str = NOTHING,
    at: float = MIDNIGHT,
) -> bytes:
    return (signer or Signer("us-east-1")).sign(credentials, method, path, query, host, headers, body_sha256, at)


# ---------------------------------------------------------------- what AWS has published


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "body", "signature"),
    [
        ("GET", "/", "", [], b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", "/", "", [], b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        (
            "GET",
            "/" + UNRESERVED,
            "",
            [],
            b"",
            "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f",
        ),
        (
            "GET",
            "/",
            "Param2=value2&Param1=value1",
            [],
            b"",
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        ),
        (
            "GET",
            "/",
            "Param1=value2&Param1=Value1",
            [],
            b"",
            "eedbc4e291e521cf13422ffca22be7d2eb8146eecf653089df300a15b2382bd1",
        ),
        (
            "GET",
            "/",
            "Param1=value2&Param1=value1",
            [],
            b"",
            "5772eed61e12b33fae39ee5e7012498b51d56abc0abb7c60486157bd471c4694",
        ),
        (
            "GET",
            "/",
            f"{UNRESERVED}={UNRESERVED}",
            [],
            b"",
            "9c3e54bfcdf0b19771a7f523ee5669cdf59bc7cc0884027167c21bb143a40197",
        ),
        ("POST", "/", "Param1=value1", [], b"", "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"),
        (
            "GET",
            "/",
            "",
            [("my-header1", "value2"), ("my-header1", "value2"), ("my-header1", "value1")],
            b"",
            "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea",
        ),
        (
            "GET",
            "/",
            "",
            [("my-header1", "value4"), ("my-header1", "value1"), ("my-header1", "value3"), ("my-header1", "value2")],
            b"",
            "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01",
        ),
        (
            "GET",
            "/",
            "",
            [("my-header2", ' "a   b   c"'), ("my-header1", " value1")],
            b"",
            "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
        ),
        (
            "POST",
            "/",
            "",
            [("my-header1", "VALUE1")],
            b"",
            "cdbc9802e29d2942e5e10b5bccfdd67c5f22c7c4e8ae67b53629efa58b974b7d",
        ),
        (
            "POST",
            "/",
            "",
            [("content-type", FORM)],
            b"Param1=value1",
            "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
        ),
    ],
)
def test_signature_matches_published_test_suite(method, path, query, headers, body, signature):
    lines = signed(
        Signer("us-east-1", "service"),
        method=method,
        path=path,
        query=query,
        host="example.amazonaws.com",
        headers=headers,
        body_sha256=sha256(body).hexdigest(),
        at=SUITE_AT,
    )
    assert signature_of(lines) == signature


def test_signature_matches_published_example_with_session_token():
    credentials = dataclasses.replace(SUITE, token=SUITE_TOKEN)
    lines = signed(
        Signer("us-east-1", "service"), credentials, path="/", host="example.amazonaws.com", headers=[], at=SUITE_AT
    )
    assert lines.decode().split("\r\n") == [
        "authorization: AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        "SignedHeaders=host;x-amz-date;x-amz-security-token, "
        "Signature=85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead",
        "x-amz-date: 20150830T123600Z",
        f"x-amz-security-token: {SUITE_TOKEN}",
        "",
    ]


def test_signature_matches_published_example_with_query():
    lines = signed(
        Signer("us-east-1", "iam"),
        method="GET",
        path="/",
        query="Action=ListUsers&Version=2010-05-08",
        host="iam.amazonaws.com",
        headers=[("content-type", f"{FORM}; charset=utf-8")],
        at=SUITE_AT,
    )
    assert signature_of(lines) == "5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"


# ---------------------------------------------------------------- what is kept between calls


def test_cached_signing_key_is_not_used_elsewhere():
    """One signer, going to and fro between credentials, days and seconds, against a new one for each signature."""
    others = [
        SUITE,
        dataclasses.replace(SUITE),
        dataclasses.replace(SUITE, secret_key="another"),
        dataclasses.replace(SUITE, access_key="ANOTHER"),
        dataclasses.replace(SUITE, token="one"),
        dataclasses.replace(SUITE, token="two"),
    ]
    moments = [MIDNIGHT - 0.001, MIDNIGHT, MIDNIGHT + 0.999, MIDNIGHT + 1, MIDNIGHT + 86_400, MIDNIGHT - 86_400, 0]
    signer = Signer("us-east-1")
    seen = set()
    for turn in (moments, moments[::-1]):
        for at in turn:
            for credentials in others:
                lines = signed(signer, credentials, at=at)
                assert lines == signed(credentials=credentials, at=at)
                seen.add(lines)
    assert len(seen) == len({(credentials, int(at)) for credentials in others for at in moments})


def test_signing_cache_is_bounded_and_correct():
    """Each path is one, and so is each content type: what is kept is bounded, and stays right."""
    signer = Signer("us-east-1")
    for number in (*range(600), *range(600)):
        path, headers = f"/model/m{number}/converse", [("content-type", f"a/{number % 3}")]
        assert signed(signer, path=path, headers=headers) == signed(path=path, headers=headers)
    assert len(signer._templates) <= 300


def test_date_changes_with_the_second():
    signer = Signer("us-east-1")
    last, first = signed(signer, at=MIDNIGHT - 0.001), signed(signer, at=MIDNIGHT)
    assert b"/20261118/" in last
    assert b"x-amz-date: 20261118T235959Z\r\n" in last
    assert b"/20261119/" in first
    assert b"x-amz-date: 20261119T000000Z\r\n" in first


def test_region_and_service_change_signature():
    signers = [Signer("us-east-1"), Signer("eu-west-1"), Signer("us-east-1", "dynamodb")]
    for _ in range(2):
        assert len({signature_of(signed(signer)) for signer in signers}) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "GET"},
        {"path": "/model/standard/converse"},
        {"query": "a=b"},
        {"host": "localhost"},
        {"headers": []},
        {"headers": [("content-type", "text/plain")]},
        {"headers": [*JSON, ("x-amzn-bedrock-trace", "ENABLED")]},
        {"body_sha256": sha256(b"{}").hexdigest()},
        {"at": MIDNIGHT + 1},
    ],
)
def test_every_input_changes_signature(changed):
    assert signature_of(signed(**changed)) != signature_of(signed())


@pytest.mark.parametrize(
    "spelling",
    [
        "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.x",
        "arn%3Aaws%3Abedrock%3Aus-east-1%3A123456789012%3Ainference-profile%2Fus.x",
        "arn%3aaws%3abedrock%3aus-east-1%3a123456789012%3ainference-profile%2fus.x",
        "arn%253Aaws%253Abedrock%253Aus-east-1%253A123456789012%253Ainference-profile%252Fus.x",
    ],
)
def test_spellings_of_model_id_have_one_signature(spelling):
    straight = "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A123456789012%3Ainference-profile%2Fus.x/converse"
    assert signed(path=parse_path(f"/model/{spelling}/converse").path) == signed(path=straight)


# ---------------------------------------------------------------- queries


@pytest.mark.parametrize(
    ("query", "canonical"),
    [
        ("", ""),
        ("a=1", "a=1"),
        ("b=2&a=1", "a=1&b=2"),
        ("a=2&a=1", "a=1&a=2"),
        ("a=1&a=&A=3", "A=3&a=&a=1"),
        ("a", "a="),
        ("=a", "=a"),
        ("a=b=c", "a=b%3Dc"),
        ("&&a=1&", "a=1"),
        ("a=x/y:z,+*'()!", "a=x%2Fy%3Az%2C%2B%2A%27%28%29%21"),
        ("a=%2f%2F%7e%41", "a=%2F%2F~A"),
        ("a=%C3%A9%ff", "a=%C3%A9%FF"),
        ("a=%2526", "a=%2526"),
        ("a=%26b%3D1", "a=%26b%3D1"),
        ("a%2D=1&a.=2", "a-=1&a.=2"),
        ("maxResults=10&statusEquals=Completed", "maxResults=10&statusEquals=Completed"),
    ],
)
def test_query_is_canonicalised(query, canonical):
    assert canonicalize_query(query) == canonical
    assert canonicalize_query(canonical) == canonical


@pytest.mark.parametrize("query", ["a=%", "a=%2", "a=%zz", "a=%%41", "a b", "a=\r\n", "a=\x00", "a=é", "a=\t"])
def test_unsendable_query_is_refused(query):
    with pytest.raises(ValueError, match="a query is printable ASCII"):
        canonicalize_query(query)


# ---------------------------------------------------------------- what is refused

CONTROLS = ["\r\n", "\n", "\r", "\x00", "\t", "\x1f", "\x7f", "\x85", "é", "\u2028"]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("where", ["method", "path", "query", "host", "body_sha256"])
def test_control_character_in_request_is_refused(where, control):
    for text in (f"/x{control}", f"{control}/x", f"/x{control}x-evil: 1"):
        with pytest.raises(ValueError, match="printable ASCII"):
            signed(**{where: text})


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("more", [[], [("x-more", "1")]])
def test_control_character_in_header_is_refused(more, control):
    with pytest.raises(ValueError, match="printable ASCII"):
        signed(headers=[("content-type", f"application/json{control}"), *more])


@pytest.mark.parametrize(
    "name",
    ["", "X-Big", "a b", "a:", "a\n", "é", "host", "authorization", "x-amz-date", "x-amz-security-token"],
)
def test_header_reserved_for_signer_is_refused(name):
    with pytest.raises(ValueError, match="name in lower case"):
        signed(headers=[*JSON, (name, "1")])


@pytest.mark.parametrize(
    "path", ["", "x", "*", "http://x/y", "//", "//x", "/x//y", "/x//", "/.", "/..", "/./x", "/x/..", "/x/../y", "/a b"]
)
def test_path_with_dot_segments_is_refused(path):
    with pytest.raises(ValueError, match="a path"):
        signed(path=path)


@pytest.mark.parametrize("path", ["/", "/x/", "/...", "/.x", "/x.", "/..x/y", "/x/.y"])
def test_harmless_dots_in_path_are_accepted(path):
    assert signed(path=path)


@pytest.mark.parametrize("region", ["", "us east", "US-EAST-1", "us/east", "us-east-1\n"])
def test_invalid_region_is_refused(region):
    with pytest.raises(ValueError, match="region"):
        Signer(region)


@pytest.mark.parametrize("bad", ["", "a b", "a\r\nx-evil: 1", "a\x00", "é"])
def test_unsendable_credentials_are_refused_and_redacted(bad):
    for values in ((bad, "Sekret"), ("AKID", f"Sekret{bad}" if bad else ""), ("AKID", "x", f"Sekret{bad or ' '}")):
        with pytest.raises(ValueError, match="printable ASCII") as refused:
            AwsCredentials(*values)
        assert "Sekret" not in str(refused.value)


def test_credentials_repr_shows_no_secret():
    shown = repr(AwsCredentials("AKID", "the-secret", "the-token")) + str(
        AwsCredentials("AKID", "the-secret", "the-token")
    )
    assert "AKID" in shown
    assert "the-" not in shown
    with pytest.raises(dataclasses.FrozenInstanceError):
        SUITE.token = "x"
