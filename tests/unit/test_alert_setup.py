"""The section `alerts`, and how alerts are composed from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from price_keeper.alerts.alert import Alert
from price_keeper.alerts.alert_setup import add_alert_metrics, load_secret, open_alerts
from price_keeper.config.config_sections import AlertsConfig, Config, WebhookConfig
from price_keeper.errors import ConfigError
from price_keeper.tasks import Tasks
from price_keeper.telemetry.metrics import MetricsRegistry

from tests.support.alerts import DAY, USD, ScriptedAlertStore, scope, write_leftover
from tests.support.clock import ManualClock, settle
from tests.support.commands import call_in_process
from tests.support.configs import LABELS, problems, read
from tests.support.raw_clients import eventually

ELSEWHERE = "https://alerts.example.com/hook?sig=hunter2"
SECRET = "correct horse battery"


def test_alert_defaults_match_documentation() -> None:
    assert read("").alerts == AlertsConfig((50, 80, 95, 100), None)


def test_thresholds_and_webhook_are_read() -> None:
    found = read(f"alerts: {{thresholds_pct: [10, 150], webhook: {{url: '{ELSEWHERE}', secret_env: HOOK}}}}").alerts
    assert found == AlertsConfig((10, 150), WebhookConfig(ELSEWHERE, "HOOK", None))
    assert read("alerts: {thresholds_pct: []}").alerts.thresholds_pct == ()
    assert read("alerts: {webhook: null}").alerts.webhook is None


def test_environment_overrides_webhook() -> None:
    environ = {"PRICE_KEEPER__ALERTS__WEBHOOK": f"{{url: '{ELSEWHERE}', secret_file: /run/secrets/hook}}"}
    assert read("", environ).alerts.webhook == WebhookConfig(ELSEWHERE, None, "/run/secrets/hook")


def test_webhook_address_is_redacted_everywhere() -> None:
    webhook = WebhookConfig(ELSEWHERE, "HOOK")
    assert "hunter2" not in repr(dataclasses.replace(Config.development(), alerts=AlertsConfig(webhook=webhook)))
    (problem,) = problems("alerts: {webhook: {url: 'http://x/?sig=hunter2', secret_env: HOOK}}" + LABELS)
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[0]", "expected percentages of 1 to 999"),
        ("[1000]", "expected percentages of 1 to 999"),
        ("[50, 50]", "expected each threshold once"),
        (str(list(range(1, 22))), "expected at most 20 thresholds"),
        ("[50.5]", "expected a whole number"),
    ],
)
def test_invalid_thresholds_are_reported(text: str, complaint: str) -> None:
    (problem,) = problems(f"alerts: {{thresholds_pct: {text}}}" + LABELS)
    assert complaint in problem


@pytest.mark.parametrize(
    "url",
    [
        "http://alerts.example.com/",
        "https://",
        "https:///path",
        "https://user:password@example.com/",
        "https://user@example.com/",
        "https://example.com#fragment",
        "https://example.com/#fragment",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://exa mple.com/",
        "https://example.com/a b",
        "https://127.1/",
        "https://2130706433/",
        "https://example.com\\@127.0.0.1/",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "HTTPS://example.com/",
        "https://example.com/" + "a" * 2048,
    ],
)
def test_invalid_webhook_address_is_reported(url: str) -> None:
    (problem,) = problems(f"alerts: {{webhook: {{url: '{url}', secret_env: HOOK}}}}" + LABELS)
    assert "alerts.webhook.url: expected https://host" in problem


@pytest.mark.parametrize(
    "url", ["https://example.com", "https://a.b:8443/x?y=%2F&z=1", "https://[2600::1]/", "https://8.8.8.8?x"]
)
def test_valid_webhook_address_is_accepted(url: str) -> None:
    assert read(f"alerts: {{webhook: {{url: '{url}', secret_env: HOOK}}}}").alerts.webhook == WebhookConfig(url, "HOOK")


@pytest.mark.parametrize("secrets", ["", ", secret_env: A, secret_file: b"])
def test_exactly_one_secret_source_is_required(secrets: str) -> None:
    (problem,) = problems(f"alerts: {{webhook: {{url: '{ELSEWHERE}'{secrets}}}}}" + LABELS)
    assert "exactly one of secret_env and secret_file is needed" in problem


def configured(tmp_path: Path, webhook: WebhookConfig | None) -> Config:
    config = read(f"journal: {{dir: {tmp_path}}}")
    return dataclasses.replace(config, alerts=AlertsConfig(webhook=webhook))


@pytest.mark.parametrize(
    ("webhook", "environ", "complaint"),
    [
        (WebhookConfig(ELSEWHERE, "HOOK"), {}, "the environment variable HOOK is not set"),
        (WebhookConfig(ELSEWHERE, "HOOK"), {"HOOK": "hunter2"}, "its secret has less than 16 bytes"),
        (WebhookConfig(ELSEWHERE, None, "/nowhere/secret"), {}, "cannot read /nowhere/secret: No such file"),
        (
            WebhookConfig("https://169.254.169.254/", "HOOK"),
            {"HOOK": SECRET},
            "169.254.169.254 is not a public address",
        ),
        (WebhookConfig("https://[::ffff:10.0.0.1]/", "HOOK"), {"HOOK": SECRET}, "is not a public address"),
    ],
)
async def test_unusable_webhook_is_reported_at_start(
    tmp_path: Path, webhook: WebhookConfig, environ: dict[str, str], complaint: str
) -> None:
    clock = ManualClock()
    async with Tasks(clock) as tasks:
        with pytest.raises(ConfigError, match=complaint) as caught:
            async with open_alerts(configured(tmp_path, webhook), environ, ScriptedAlertStore(), clock, tasks):  # type: ignore[arg-type]
                pass
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("has_webhook", [True, False])
async def test_composed_alerts_raise_store_and_count(tmp_path: Path, has_webhook: bool) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    webhook = WebhookConfig("https://alerts.invalid/", None, str(tmp_path / "secret")) if has_webhook else None
    clock, telemetry, journal = ManualClock(), MetricsRegistry(), tmp_path / "journal"
    journal.mkdir()
    async with (
        Tasks(clock) as tasks,
        open_alerts(configured(journal, webhook), {}, ScriptedAlertStore(), clock, tasks) as alerts,  # type: ignore[arg-type]
    ):
        add_alert_metrics(telemetry, alerts)
        assert await alerts.raise_alert(scope(), "premium", DAY, 80, USD, USD)
        assert await alerts.raise_alert(scope(), "premium", DAY, 80, USD, USD)
        await settle()
        lines = telemetry.render_own().splitlines()
    assert 'price_keeper_alerts_raised_total{threshold="80"} 2' in lines
    assert "price_keeper_webhooks_delivered_total 0" in lines
    assert 'price_keeper_webhooks_failed_total{last="true"} 0' in lines
    assert f"price_keeper_webhooks_waiting {2 if has_webhook else 0}" in lines
    assert len(list(journal.glob("alerts/*.json"))) == (2 if has_webhook else 0)


async def test_composed_alerts_resume_pending_and_stop_before_webhook_closes(tmp_path: Path) -> None:
    left = Alert("id-1", scope(), "premium", DAY.key, DAY.end, 80, USD, USD, DAY.start)
    write_leftover(tmp_path / "alerts", f"{left.file_stem}.json", left.content())
    config, clock, rows = (
        configured(tmp_path, WebhookConfig("https://alerts.invalid/", "HOOK")),
        ManualClock(),
        ScriptedAlertStore(),
    )
    async with Tasks(clock) as tasks:
        async with open_alerts(config, {"HOOK": SECRET}, rows, clock, tasks) as alerts:  # type: ignore[arg-type]
            await eventually(lambda: alerts.raised)
            assert rows.items[left.marker_key] == left.marker
        with pytest.raises(RuntimeError, match="are stopping"):
            tasks.start("too late", settle)


def test_secret_file_newline_is_not_part_of_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    from_file = load_secret(WebhookConfig(ELSEWHERE, None, str(tmp_path / "secret")), {})
    assert from_file == load_secret(WebhookConfig(ELSEWHERE, "HOOK"), {"HOOK": SECRET}) == SECRET.encode()


@pytest.mark.parametrize("command", ["check-config", "serve"])
@pytest.mark.parametrize(
    ("url", "secret", "words"),
    [
        ("https://127.0.0.1/hook", SECRET, "alerts.webhook.url: 127.0.0.1 is not a public address"),
        ("https://169.254.169.254/latest", SECRET, "alerts.webhook.url: 169.254.169.254 is not a public address"),
        ("https://[::1]:8443/hook", SECRET, "alerts.webhook.url: ::1 is not a public address"),
        (ELSEWHERE, "", "the environment variable HOOK is not set"),
        (ELSEWHERE, "too short", "its secret has less than 16 bytes"),
    ],
)
def test_check_config_and_serve_refuse_same_webhooks(
    tmp_path: Path, command: str, url: str, secret: str, words: str
) -> None:
    file = tmp_path / "config.yaml"
    listens = "listen: {data: '127.0.0.1:0', control: '127.0.0.1:0'}\nupstream: {endpoint: simulated}\n"
    file.write_text(f"{listens}alerts: {{webhook: {{url: '{url}', secret_env: HOOK}}}}{LABELS}")
    result = call_in_process(
        command, folder=tmp_path, HOOK=secret, PRICE_KEEPER_JWT_SECRET="a secret of the test's own, long enough"
    )
    assert (result.returncode, words in result.stderr) == (2, True), result.stderr
    assert "hunter2" not in result.stderr


def test_check_config_accepts_webhook_that_serve_accepts(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"alerts: {{webhook: {{url: '{ELSEWHERE}', secret_env: HOOK}}}}{LABELS}")
    assert call_in_process("check-config", folder=tmp_path, HOOK=SECRET).returncode == 0
