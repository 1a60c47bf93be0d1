"""TLS of the data port: the operator's certificate, or certificates of a local authority for development.

`create_server_context` loads the operator's files; `ensure_local_certificates` creates those of the `dev` command.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from price_keeper.errors import ConfigError

CERTIFICATE_LIFETIME = timedelta(days=365)
RENEWAL_MARGIN = timedelta(days=30)
LOCAL_NAMES = ("localhost",)
LOCAL_ADDRESSES = ("127.0.0.1", "::1")


def create_server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS context of the data port: TLS 1.2 or later, with ALPN for HTTP/2 and HTTP/1.1.

    Raises a ConfigError that names the file that cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2", "http/1.1"])
    for file in (certificate, key):
        if not os.access(file, os.R_OK):
            raise ConfigError([f"listen.tls: cannot read {file}"])
    try:
        context.load_cert_chain(certificate, key, password=_refuse_passphrase)
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            [f"listen.tls: {certificate} and {key} must be a certificate and its key, in PEM without passphrase"]
        ) from None
    return context


def _refuse_passphrase() -> str:
    raise ValueError("a key without a passphrase is needed")  # without this, OpenSSL would ask at the terminal


def ensure_local_certificates(folder: Path, now: float) -> tuple[Path, Path, Path]:
    """Paths of the authority's certificate, this machine's certificate and its key.

    Creates all three if any is missing or the certificate expires within RENEWAL_MARGIN.
    """
    authority, certificate, key = folder / "ca.pem", folder / "server.pem", folder / "server.key"
    if not _is_valid(certificate, authority, key, now):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        issued_at = datetime.fromtimestamp(now, UTC)
        # The authority's key is never written to disk, so nothing else can ever be signed with it.
        signing_key, server_key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
        authority_certificate = _issue_certificate(
            "Bedrock Price Keeper, local authority", signing_key, signing_key, issued_at, is_authority=True
        )
        server_certificate = _issue_certificate(
            "localhost", server_key, signing_key, issued_at, is_authority=False, issuer=authority_certificate.subject
        )
        _write_private_file(key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        _write_private_file(certificate, server_certificate.public_bytes(Encoding.PEM))
        _write_private_file(authority, authority_certificate.public_bytes(Encoding.PEM))
    return authority, certificate, key


def _is_valid(certificate: Path, authority: Path, key: Path, now: float) -> bool:
    if not (certificate.exists() and authority.exists() and key.exists()):
        return False
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    return loaded.not_valid_after_utc - RENEWAL_MARGIN > datetime.fromtimestamp(now, UTC)


def _issue_certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    signing_key: EllipticCurvePrivateKey,
    now: datetime,
    *,
    is_authority: bool,
    issuer: x509.Name | None = None,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + CERTIFICATE_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .add_extension(_build_key_usage(is_authority), critical=True)
    )
    if not is_authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(_list_local_names()), critical=False)
    return builder.sign(signing_key, hashes.SHA256())


def _build_key_usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _list_local_names() -> Sequence[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(name) for name in LOCAL_NAMES]
    return names + [x509.IPAddress(ipaddress.ip_address(address)) for address in LOCAL_ADDRESSES]


def _write_private_file(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
