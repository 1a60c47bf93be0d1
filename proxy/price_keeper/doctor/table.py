"""Every check, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.app import Role
from price_keeper.doctor import (
    control_service,
    dynamodb,
    identity,
    journal,
    machine,
    outside,
    ports,
    registered,
    store_file,
)
from price_keeper.doctor.findings import Check, aside
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.upstream import upstream_checks

_STORE_AWAY = "let this machine reach DynamoDB (a VPC endpoint, a firewall), or correct store.endpoint and store.region"
_DISK_AWAY = "its disk hangs: look at it with df and dmesg, or name another one in the configuration"
_PROVIDER_AWAY = "the provider of credentials hangs: see AWS_PROFILE, credential_process, or the metadata service"

_BEFORE = (
    Check("token keys", aside(identity.token_keys)),
    Check("admin key", aside(identity.admin_key)),
    Check("control service", control_service.control_service, "correct auth.control_url, or DNS"),
    Check("AWS credentials", identity.aws_credentials, _PROVIDER_AWAY),
    Check("Bedrock API key", aside(identity.bedrock_key)),
    Check("clock by the store", machine.clock_by_store, _STORE_AWAY),
    Check("clock by Bedrock", machine.clock_by_bedrock),
    Check("time zones", aside(machine.time_zones)),
    Check("open files", aside(machine.open_files)),
    Check("store file", aside(store_file.store_file), _DISK_AWAY),
    Check("store is whole", aside(store_file.store_is_whole), _DISK_AWAY),
    Check("DynamoDB", dynamodb.store_reached, _STORE_AWAY),
    Check("tables", dynamodb.store_tables, _STORE_AWAY),
    Check("permissions", dynamodb.store_permissions, _STORE_AWAY),
    Check("org of the identity", registered.identity_org, _STORE_AWAY),
    Check("journal", aside(journal.journal_folder), _DISK_AWAY),
    Check("journal's room", aside(journal.journal_room), _DISK_AWAY),
    Check("journal's leftovers", aside(journal.journal_leftovers), _DISK_AWAY),
    Check("certificate", aside(ports.certificate)),
)
_AFTER = (
    Check("price list", outside.price_list),
    Check("webhook", outside.webhook, "correct alerts.webhook.url, or DNS"),
)


# The rest is every role's: also a control service has a journal, of what it is to bring to the store.
_OF_CALLS = frozenset(
    ("Bedrock API key", "clock by Bedrock", "open files", "org of the identity", "certificate", "price list")
)
_NOT_OF: Mapping[Role, frozenset[str]] = {
    "both": frozenset(("control service",)),
    "sidecar": frozenset(("admin key",)),
    "control": _OF_CALLS | {"control service"},
}


def checks_of(context: DoctorContext) -> list[Check]:
    upstream = upstream_checks(context) if context.has_data_port else []
    checks = [*_BEFORE, *ports.port_checks(context), *upstream, *_AFTER]
    return [check for check in checks if check.name not in _NOT_OF[context.role]]
