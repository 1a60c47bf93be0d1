"""Authentication by a SigV4 signature over the request exactly as it arrived, or by an API key.

botocore computes the signature, so that a mistake in the product's own signer cannot be repeated here.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256

from bedrock_simulator.aws_errors import AwsError, InvalidApiKey

MAX_SKEW_SECONDS = 300

_ALGORITHM = "AWS4-HMAC-SHA256"
_SERVICE = "bedrock"
_TIMESTAMP = "%Y%m%dT%H%M%SZ"
_AUTHORIZATION_PART = re.compile(r"(Credential|SignedHeaders|Signature)=([^,\s]+)")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Keys:
    """The accepted credentials. With a session token the key pair is temporary, and requests must carry the token."""

    access_key: str
    secret_key: str
    session_token: str | None = None
    bearer: str | None = None
    region: str | None = None  # required in the signature; None accepts any


DEFAULT_KEYS = Keys("SIMULATEDACCESSKEY00", "simulated-secret-key", bearer="simulated-api-key")


def check_authorization(keys: Keys, method: str, target: str, headers: Headers, body: bytes, now: float) -> None:
    """Raise AWS's error unless the request was signed with the keys, or carries the API key."""
    header_values = _group_headers(headers)
    authorization = header_values.get("authorization", [""])[0]
    scheme, _, rest = authorization.partition(" ")
    if not authorization:
        raise AwsError("MissingAuthenticationTokenException")
    if scheme == "Bearer":
        if keys.bearer is None or not _is_same(rest.strip(), keys.bearer):
            raise InvalidApiKey
    elif scheme == _ALGORITHM:
        _check_signature(keys, method, target, header_values, rest, body, now)
    else:
        raise AwsError("IncompleteSignatureException", f"Unsupported authorization scheme: {scheme}")


def _check_signature(
    keys: Keys, method: str, target: str, header_values: dict[str, list[str]], rest: str, body: bytes, now: float
) -> None:
    parts = dict(_AUTHORIZATION_PART.findall(rest))
    scope = parts.get("Credential", "").split("/")
    timestamp = header_values.get("x-amz-date", [""])[0]
    if len(parts) != 3 or len(scope) != 5:
        raise AwsError("IncompleteSignatureException", "Authorization header requires 'Credential', 'SignedHeaders' "
                              "and 'Signature' parameters.")  # fmt: skip
    access_key, date, region, service, end = scope
    if (
        not _is_same(access_key, keys.access_key)
        or header_values.get("x-amz-security-token", [None])[0] != keys.session_token
    ):
        raise AwsError("UnrecognizedClientException")
    _check_timestamp(timestamp, now)
    if service != _SERVICE or end != "aws4_request" or date != timestamp[:8]:
        raise AwsError("InvalidSignatureException", f"Credential should be scoped to correct service: '{_SERVICE}'.")
    if keys.region not in (None, region):
        raise AwsError("InvalidSignatureException", "Credential should be scoped to a valid region.")
    signed = parts["SignedHeaders"].split(";")
    if "host" not in signed or any(name not in header_values for name in signed):
        raise AwsError("InvalidSignatureException", "'Host' must be a signed header, and every signed header present.")
    hashes = header_values.get("x-amz-content-sha256", [])
    if any(stated != sha256(body).hexdigest() for stated in hashes):
        raise AwsError("InvalidSignatureException")
    expected = _compute_signature(
        keys, method, target, {name: header_values[name] for name in signed}, body, timestamp, region
    )
    if not _is_same(parts["Signature"], expected):
        raise AwsError("InvalidSignatureException")


def _check_timestamp(timestamp: str, now: float) -> None:
    try:
        moment = datetime.strptime(timestamp, _TIMESTAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise AwsError(
            "IncompleteSignatureException", "X-Amz-Date is missing or not in ISO8601 basic format."
        ) from None
    current = datetime.fromtimestamp(now, UTC).strftime(_TIMESTAMP)
    if moment < now - MAX_SKEW_SECONDS:
        raise AwsError("InvalidSignatureException", f"Signature expired: {timestamp} is too long before {current}")
    if moment > now + MAX_SKEW_SECONDS:
        raise AwsError("InvalidSignatureException", f"Signature not yet current: {timestamp} is later than {current}")


def _compute_signature(
    keys: Keys, method: str, target: str, signed: dict[str, list[str]], body: bytes, timestamp: str, region: str
) -> str:
    # Imported only for a signed request: botocore is slow to import.
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.compat import HTTPHeaders
    from botocore.credentials import Credentials

    headers = HTTPHeaders()
    for name, values in signed.items():
        for value in values:
            headers[name] = value
    request = AWSRequest(method=method, url=f"http://simulator{target}", data=body, headers=dict.fromkeys(()))
    request.context["timestamp"] = timestamp
    signer = SigV4Auth(Credentials(keys.access_key, keys.secret_key), _SERVICE, region)
    signer.headers_to_sign = lambda _: headers  # the client selected the signed headers
    canonical = signer.canonical_request(request)
    return str(signer.signature(signer.string_to_sign(request, canonical), request))


def _group_headers(headers: Headers) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return values


def _is_same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
