"""What the value of each key may be, and the exact line for each that may not."""

from __future__ import annotations

import pytest
from price_keeper.config.config_sections import IdentityConfig, KeyConfig
from price_keeper.config.value_checks import Address

from tests.support.configs import LABELS, ORG, problems, read


def test_labels_are_required() -> None:
    assert problems("") == ["config.yaml:1: labels: required, but missing"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "\nlisten: {data: 8080}",
            "2: listen.data: expected text (put it in quotes), found 8080",
        ),
        *(
            (
                f"listen:\n  health: '{address}'",
                f'2: listen.health: expected host:port, such as 127.0.0.1:8080 or [::1]:8080, found "{address}"',
            )
            for address in (
                ":80",
                "a",
                "a:",
                "a:x",
                "a:65536",
                "a:-1",
                "::1:80",
                "[::1]",
                "[::1%eth0]:80",
                "[a]:80",
                "a b:80",
                "256.0.0.1:80",
                "1.2.3:80",
                "a..b:80",
                "-a:80",
                "http://a:80",
                "*:80",
                "u@a:80",
                "a:0080000",
                "é:80",
            )
        ),
        (
            "listen: {control: 127.0.0.1:8080}",
            "1: listen.control: the same address as listen.data",
        ),
        (
            "listen: {health: 127.0.0.1:8081}",
            "1: listen.health: the same address as listen.control",
        ),
        *(
            (
                f"upstream:\n  endpoint: '{endpoint}'",
                "2: upstream.endpoint: expected http(s)://host or http(s)://host:port and nothing after it, "
                'or "simulated", found text',
            )
            for endpoint in (
                "Simulated",
                "host",
                "ftp://host",
                "http://",
                "http://host/",
                "http://host/path",
                "http://host?q",
                "http://host#f",
                "http://user:pw@host",
                "http://user@host",
                "http://host:0",
                "http://host:65536",
                "http://host:",
                "http://::1",
                "http://[::1",
                "http://ho st",
                "http://1.2.3",
                "",
            )
        ),
        (
            "store: {endpoint: simulated}",
            "1: store.endpoint: expected http(s)://host or http(s)://host:port and nothing after it, found text",
        ),
        *(
            (
                f"store:\n  region: {region}",
                f'2: store.region: expected an AWS region, such as us-east-1, found "{region}"',
            )
            for region in ("us-east", "us_east_1", "US-EAST-1", "useast1", "us-east-1a")
        ),
        (
            "upstream: {auth: sigv5}",
            '1: upstream.auth: expected one of sigv4, bearer (did you mean "sigv4"?), found "sigv5"',
        ),
        (
            "store: {engine: dynamo}",
            '1: store.engine: expected one of sqlite, dynamodb (did you mean "dynamodb"?), found "dynamo"',
        ),
        ("store: {path: ''}", '1: store.path: expected a path, found ""'),
        ('store: {path: "a\\0"}', '1: store.path: expected a path, found "a\\x00"'),
        (
            "store: {table_prefix: a/b}",
            '1: store.table_prefix: expected at most 100 letters, digits or any of _.-, found "a/b"',
        ),
        ("journal:\n\n  fsync_interval_ms: 0", "3: journal.fsync_interval_ms: expected 1 to 60000, found 0"),
        ("journal: {max_unflushed_usd: 0}", "1: journal.max_unflushed_usd: expected more than 0, found 0"),
        (
            "journal: {flush_interval_secs: -1}",
            "1: journal.flush_interval_secs: expected 0.001 to 86400 seconds, found -1",
        ),
        (
            "journal: {flush_interval_secs: 16}",
            "1: journal.flush_interval_max_secs: less than flush_interval_secs, which is 16",
        ),
        (
            "journal:\n  flush_interval_max_secs: 0.5",
            "2: journal.flush_interval_max_secs: less than flush_interval_secs, which is 1",
        ),
        ("aggregator: {interval_secs: 0}", "1: aggregator.interval_secs: expected 0.001 to 86400 seconds, found 0"),
        ("on_store_down: stop", '1: on_store_down: expected one of serve, refuse, found "stop"'),
        ("unknown_org: serve", '1: unknown_org: expected one of refuse, meter, found "serve"'),
        ("unlabelled: meter", "1: default_price: required with unlabelled: meter"),
        (
            "default_price: {input: 1, output: 1, cache_read: 1, cache_write_5m: 1}",
            "1: default_price.cache_write_1h: required, but missing: the model may be one that reads and writes caches",
        ),
        (
            "defaults: {tight_mode_threshold_pct: 101}",
            "1: defaults.tight_mode_threshold_pct: expected 1 to 100, found 101",
        ),
        (
            "defaults:\n  refresh_interval_tight_secs: 301",
            "2: defaults.refresh_interval_tight_secs: more than refresh_interval_normal_secs, which is 300",
        ),
        (
            "defaults: {refresh_interval_normal_secs: 59}",
            "1: defaults.refresh_interval_tight_secs: more than refresh_interval_normal_secs, which is 59",
        ),
        ("defaults: {agg_shard_count: 12}", "1: defaults.agg_shard_count: expected one of 8, 16, 32, 64, found 12"),
        (
            "defaults: {timezone: europe/berln}",
            '1: defaults.timezone: expected an IANA time zone (did you mean "Europe/Berlin"?), found "europe/berln"',
        ),
        *(
            (f"auth: {{control_url: '{url}'}}", f'1: auth.control_url: {words}, found "{url}"')
            for url, words in (
                ("http://control:8081", "expected https: secrets travel there; http is for loopback alone"),
                ("http://10.0.0.1", "expected https: secrets travel there; http is for loopback alone"),
                ("http://[fe80::1]:8081", "expected https: secrets travel there; http is for loopback alone"),
                ("https://control/api", "expected http(s)://host or http(s)://host:port and nothing after it"),
                ("control:8081", "expected http(s)://host or http(s)://host:port and nothing after it"),
            )
        ),
        ("auth: {max_sessions: -1}", "1: auth.max_sessions: expected at least 0, found -1"),
        (
            "auth: {issuer: 'a b'}",
            '1: auth.issuer: expected 1 to 128 letters, digits or any of ._:/-, found "a b"',
        ),
        (
            "auth: {admin_api_key_env: sk-live-1}",
            "1: auth.admin_api_key_env: expected the name of an environment variable, found text",
        ),
        (
            "auth:\n  admin_api_key: sk-live-1",
            "2: auth.admin_api_key: a secret never stands in the configuration itself; "
            "name its source with admin_api_key_env or admin_api_key_file",
        ),
        ("auth: {keys: []}", "1: auth.keys: at least one key is needed"),
        (
            "auth:\n  keys:\n    - {kid: a, alg: HS256, secret: abc, secret_env: X}",
            "3: auth.keys.0.secret: a secret never stands in the configuration itself; "
            "name its source with secret_env or secret_file",
        ),
        (
            "auth: {keys: [{kid: a, alg: HS256}]}",
            "1: auth.keys.0: exactly one of secret_env, secret_file is needed, found none",
        ),
        (
            "auth:\n  keys:\n  - {kid: a, alg: HS256, secret_env: A}\n"
            "  - {kid: b, alg: HS256, secret_env: A, secret_file: b}",
            "4: auth.keys.1: exactly one of secret_env, secret_file is needed, found secret_env and secret_file",
        ),
        (
            "auth: {keys: [{kid: a, alg: RS256}]}",
            "1: auth.keys.0: exactly one of private_key_env, private_key_file, public_key_file is needed, found none",
        ),
        (
            "auth:\n  keys:\n  - kid: a\n    alg: EdDSA\n    secret_env: A",
            "5: auth.keys.0.secret_env: not for EdDSA, whose key comes from "
            "private_key_env or private_key_file or public_key_file",
        ),
        (
            "auth: {keys: [{kid: a, alg: HS256, public_key_file: x}]}",
            "1: auth.keys.0.public_key_file: not for HS256, whose key comes from secret_env or secret_file",
        ),
        (
            "auth:\n  keys:\n  - {kid: a, alg: HS256, secret_env: A}\n  - {kid: a, alg: HS256, secret_env: B}",
            "4: auth.keys.1.kid: the same as auth.keys.0.kid",
        ),
        ("auth:\n  mode: identity", "1: auth.identity: required with mode: identity"),
        (
            f"auth:\n  identity: {{org: {ORG}, app: a}}",
            "2: auth.identity: only allowed with mode: identity",
        ),
        (
            f"auth:\n  mode:\n    identity: {{org: {ORG}, app: a}}",
            "2: auth.mode: expected a single value, found a mapping",
        ),
        (
            f"auth: {{mode: identity, identity: {{org: {ORG.upper()}, app: a}}}}",
            f'1: auth.identity.org: expected a UUID in lower case, found "{ORG.upper()}"',
        ),
        (
            f"auth: {{mode: identity, identity: {{org: {ORG}, app: a#b}}}}",
            '1: auth.identity.app: expected 1 to 64 letters, digits or any of ._-, and neither . nor .., found "a#b"',
        ),
        (
            f"auth: {{mode: identity, identity: {{org: {ORG}, app: a}}}}\nlisten:\n  data: 0.0.0.0:80",
            "3: listen.data: must be loopback with auth.mode: identity, where any caller can spend",
        ),
    ],
)
def test_invalid_value_is_reported_with_line(text: str, problem: str) -> None:
    assert problems(text + LABELS) == [f"config.yaml:{problem}"]


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("127.8.9.10:1", "127.8.9.10", 1, True),
        ("[::1]:65535", "::1", 65535, True),
        ("localhost:0", "localhost", 0, True),
        ("LocalHost:80", "LocalHost", 80, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("[::]:80", "::", 80, False),
        ("128.0.0.1:80", "128.0.0.1", 80, False),
        ("localhost.example.com:80", "localhost.example.com", 80, False),
        ("127.example:80", "127.example", 80, False),
        ("a-b.c1:80", "a-b.c1", 80, False),
    ],
)
def test_address_is_parsed(text: str, host: str, port: int, is_loopback: bool) -> None:
    address = Address.from_text(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, is_loopback)
    assert str(address) == text


@pytest.mark.parametrize("section", ["upstream", "store"])
@pytest.mark.parametrize(
    "endpoint",
    ["http://localhost:8000", "https://bedrock.example", "http://[::1]:80", "https://10.0.0.1", "https://a:1"],
)
def test_endpoint_is_parsed(section: str, endpoint: str) -> None:
    assert getattr(read(f"{section}: {{endpoint: '{endpoint}'}}"), section).endpoint == endpoint


def test_simulated_endpoint_is_accepted() -> None:
    assert read("upstream: {endpoint: simulated}").upstream.endpoint == "simulated"


@pytest.mark.parametrize(
    "region", ["us-east-1", "eu-central-2", "us-gov-west-1", "us-isob-east-1", "cn-north-1", "eusc-de-east-1"]
)
def test_region_is_parsed(region: str) -> None:
    assert read(f"store: {{region: {region}}}").store.region == region


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("{kid: a, alg: HS256, secret_file: /s}", KeyConfig("a", "HS256", secret_file="/s")),
        ("{kid: a, alg: EdDSA, private_key_env: K}", KeyConfig("a", "EdDSA", private_key_env="K")),
        ("{kid: a, alg: RS256, private_key_file: k}", KeyConfig("a", "RS256", private_key_file="k")),
        ("{kid: a, alg: RS256, public_key_file: k}", KeyConfig("a", "RS256", public_key_file="k")),
    ],
)
def test_signing_key_is_parsed(key: str, expected: KeyConfig) -> None:
    assert read(f"auth: {{keys: [{key}]}}").auth.keys == (expected,)


@pytest.mark.parametrize(
    "url",
    [
        "https://control.example.com",
        "https://10.0.0.1:8443",
        "http://127.0.0.1:8081",
        "http://[::1]",
        "http://localhost:1",
    ],
)
def test_control_url_is_accepted(url: str) -> None:
    assert read(f"auth: {{control_url: '{url}'}}").auth.control_url == url


@pytest.mark.parametrize("host", ["127.0.0.1", "'[::1]", "localhost"])
def test_identity_on_loopback_is_accepted(host: str) -> None:
    quote = "'" if host.startswith("'") else ""
    text = f"auth: {{mode: identity, identity: {{org: {ORG}, app: a}}}}\nlisten: {{data: {host}:0{quote}}}"
    assert read(text).auth.identity == IdentityConfig(ORG, "a")


def test_port_zero_may_be_given_twice() -> None:
    assert read("listen: {data: 127.0.0.1:0, control: 127.0.0.1:0}").listen.control.port == 0
