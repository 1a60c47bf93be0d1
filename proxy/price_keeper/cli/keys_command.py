"""`price-keeper keys new`: generate a signing key for tokens; print its configuration and how to rotate keys."""

from __future__ import annotations

import os
import secrets
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from price_keeper.auth.tokens import REFRESH_SECONDS
from price_keeper.cli.output import print_json
from price_keeper.errors import PriceKeeperError

RSA_BITS = 3072  # 128 bits of security, the same as Ed25519
SECRET_BYTES = 48

_KEY_PAIR_TEXT = """\
{private}: the private key, for the control service only
{public}: its public half, for every process that verifies tokens

For the control service, in config.yaml:

{signing}
For sidecars, which verify and cannot mint:

{verifying}"""

_SHARED_SECRET_TEXT = """\
{private}: the secret; everyone who has it can mint tokens, so HS256 is for one machine

In config.yaml:

{signing}"""

_ROTATION_TEXT = """\
To replace another key without refusing any valid token:
1. Add it as the second of auth.keys, everywhere, and restart: all verify with it, and the other one still signs.
2. When all have it, move it to the first place where tokens are signed, and restart: now it signs.
3. When the longest-lived tokens have expired (auth.refresh_seconds; {days} days by default), remove the other key
   everywhere, and delete its file."""


def run_keys_new(args: Namespace) -> int:
    kid, alg, folder = args.kid, args.alg, args.out.absolute()
    public = folder / f"{kid}.pub.pem"
    if alg == "HS256":
        private = folder / f"{kid}.secret"
        _write_key_files({private: (secrets.token_urlsafe(SECRET_BYTES) + "\n").encode()})
        instructions = _SHARED_SECRET_TEXT.format(
            private=private, signing=_format_config(kid, alg, "secret_file", private)
        )
        files = {"secret_file": private}
    else:
        private = folder / f"{kid}.pem"
        _write_key_files(dict(zip((private, public), _generate_key_pair(alg), strict=True)))
        signing = _format_config(kid, alg, "private_key_file", private)
        verifying = _format_config(kid, alg, "public_key_file", public)
        instructions = _KEY_PAIR_TEXT.format(private=private, public=public, signing=signing, verifying=verifying)
        files = {"private_key_file": private, "public_key_file": public}
    if args.json:
        print_json({"kid": kid, "alg": alg, **{name: str(path) for name, path in files.items()}})
    else:
        print(f"{instructions}\n{_ROTATION_TEXT.format(days=-(-REFRESH_SECONDS // 86_400))}")
    return 0


def _generate_key_pair(alg: str) -> tuple[bytes, bytes]:
    key: Ed25519PrivateKey | RSAPrivateKey
    key = Ed25519PrivateKey.generate() if alg == "EdDSA" else generate_private_key(65_537, RSA_BITS)
    return (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    )


def _write_key_files(files: dict[Path, bytes]) -> None:
    """Write all files or none. Never overwrites one: all tokens of an overwritten key would be refused."""
    written: list[Path] = []
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(path, "xb", opener=_build_opener(0o600 if not written else 0o644)) as file:
                written.append(path)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except OSError as failure:
        for each in written:
            with suppress(OSError):
                each.unlink()
        if isinstance(failure, FileExistsError) and not path.parent.is_file():
            raise PriceKeeperError(f"{path} is there already; name another key, or take that file away") from None
        raise PriceKeeperError(f"cannot write {path}: {failure.strerror}") from None


def _build_opener(mode: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags, mode)


def _format_config(kid: str, alg: str, source: str, file: Path) -> str:
    keys = [{"kid": kid, "alg": alg, source: str(file)}]
    return yaml.safe_dump({"auth": {"keys": keys}}, sort_keys=False, allow_unicode=True, width=10_000)
