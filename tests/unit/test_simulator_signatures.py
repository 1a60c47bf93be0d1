"""Who may ask: what botocore signs is accepted, and one changed byte is not."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from hashlib import sha256

import pytest
from bedrock_simulator.aws_errors import AwsError
from bedrock_simulator.signatures import MAX_SKEW_SECONDS, Keys, check_authorization
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

KEYS = Keys("AKIDTEST", "secret", bearer="api-key")
TEMPORARY = Keys("ASIATEST", "secret", session_token="session")
TARGET = "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A123456789012%3Ainference-profile%2Fus.x.y-v1%3A0/converse?b=2&a=1"
BODY = b'{"messages": []}'


def signed(keys: Keys = KEYS, target: str = TARGET, body: bytes = BODY, region="us-east-1", service="bedrock", **extra):
    """The headers of a request as botocore signs it now, in the form in which a server sees them."""
    headers = {"Host": "127.0.0.1:9", "Content-Type": "application/json", "User-Agent": "x", **extra}
    request = AWSRequest("POST", f"http://127.0.0.1:9{target}", headers, body)
    SigV4Auth(Credentials(keys.access_key, keys.secret_key, keys.session_token), service, region).add_auth(request)
    return [(name.encode(), str(value).encode()) for name, value in request.headers.items()]


def asked(headers, keys=KEYS, method="POST", target=TARGET, body=BODY, late=0.0):
    check_authorization(keys, method, target, headers, body, datetime.now(UTC).timestamp() + late)


def replaced(headers, name, change):
    return [(key, change(value.decode()).encode() if key == name else value) for key, value in headers]


def test_botocore_signature_is_accepted():
    asked(signed())
    asked(signed(TEMPORARY), TEMPORARY)
    asked(signed(**{"X-Amz-Content-SHA256": sha256(BODY).hexdigest()}))


def test_repeated_headers_are_signed_together():
    headers = signed(**{"X-Twice": "one,two"})
    headers.remove((b"X-Twice", b"one,two"))
    asked([*headers, (b"x-twice", b"one"), (b"x-twice", b"two")])


@pytest.mark.parametrize(
    "change",
    [
        {"body": BODY.replace(b"[", b" [", 1)},
        {"target": TARGET.replace("b=2", "b=3")},
        {"target": TARGET.replace("%2F", "/")},
        {"target": TARGET.replace("%3A0", ":0")},
        {"method": "GET"},
    ],
)
def test_one_changed_byte_is_refused(change):
    with pytest.raises(AwsError) as refused:
        asked(signed(), **change)
    assert (refused.value.kind, refused.value.status) == ("InvalidSignatureException", 403)


def test_changed_signed_header_is_refused_and_unsigned_is_not():
    headers = signed(**{"X-Amzn-Bedrock-Request-Metadata": '{"a":"b"}'})
    changed = replaced(headers, b"X-Amzn-Bedrock-Request-Metadata", lambda value: value.replace("b", "c"))
    with pytest.raises(AwsError, match="InvalidSignature"):
        asked(changed)
    asked([*headers, (b"Accept-Encoding", b"identity")])
    asked(replaced(headers, b"User-Agent", lambda _: "another"))


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        (list, "MissingAuthenticationTokenException"),
        (lambda: [(b"Authorization", b"Basic eDp5")], "IncompleteSignatureException"),
        (lambda: [(b"Authorization", b"AWS4-HMAC-SHA256 Credential=AKIDTEST")], "IncompleteSignatureException"),
        (
            lambda: replaced(signed(), b"Authorization", lambda value: value.replace("/aws4_request", "")),
            "IncompleteSignatureException",
        ),
        (
            lambda: replaced(signed(), b"Authorization", lambda value: value.replace("SignedHeaders=", "Signed=")),
            "IncompleteSignatureException",
        ),
        (
            lambda: replaced(signed(), b"Authorization", lambda value: value.replace("aws4_request", "aws5_request")),
            "InvalidSignatureException",
        ),
        (lambda: signed(Keys("AKIDOTHER", "secret")), "UnrecognizedClientException"),
        (lambda: signed(Keys("AKIDTEST", "wrong")), "InvalidSignatureException"),
        (lambda: signed(Keys("AKIDTEST", "secret", "unasked token")), "UnrecognizedClientException"),
        (lambda: signed(service="s3"), "InvalidSignatureException"),
        (lambda: signed(**{"X-Amz-Content-SHA256": "0" * 64}), "InvalidSignatureException"),
        (lambda: signed(**{"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"}), "InvalidSignatureException"),
        (lambda: replaced(signed(), b"X-Amz-Date", lambda _: "yesterday"), "IncompleteSignatureException"),
        (lambda: [(b"Authorization", b"Bearer wrong")], "AccessDeniedException"),
    ],
)
def test_unsigned_request_is_refused_like_aws(headers, kind):
    with pytest.raises(AwsError) as refused:
        asked(headers())
    assert (refused.value.kind, refused.value.status) == (kind, 403)


def test_temporary_keys_need_session_token():
    with pytest.raises(AwsError, match="UnrecognizedClient"):
        asked(signed(Keys("ASIATEST", "secret")), TEMPORARY)


def test_host_must_be_signed():
    headers = replaced(signed(), b"Authorization", lambda value: re.sub(r"host;", "", value))
    with pytest.raises(AwsError, match="signed header"):
        asked(headers)


@pytest.mark.parametrize("late", [MAX_SKEW_SECONDS + 2, -MAX_SKEW_SECONDS - 2])
def test_signature_of_other_time_is_refused(late):
    with pytest.raises(AwsError, match=r"Signature (expired|not yet current)"):
        asked(signed(), late=late)


def test_region_is_checked_if_configured():
    asked(signed(region="eu-west-1"))
    with pytest.raises(AwsError, match="valid region"):
        asked(signed(region="eu-west-1"), Keys("AKIDTEST", "secret", region="us-east-1"))


def test_api_key_is_accepted():
    asked([(b"Authorization", b"Bearer api-key")])


def test_api_key_is_refused_if_none_is_configured():
    with pytest.raises(AwsError):
        asked([(b"Authorization", b"Bearer api-key")], TEMPORARY)
