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
from price_keeper.doctor.findings import DoctorCheck, in_thread
from price_keeper.doctor.patient import DoctorContext
from price_keeper.doctor.upstream import upstream_checks

_STORE_AWAY = "let this machine reach DynamoDB (a VPC endpoint, a firewall), or correct store.endpoint and store.region"
_DISK_AWAY = "its disk hangs: look at it with df and dmesg, or name another one in the configuration"
_PROVIDER_AWAY = "the provider of credentials hangs: see AWS_PROFILE, credential_process, or the metadata service"

_BEFORE = (
    DoctorCheck("token keys", in_thread(identity.token_keys)),
    DoctorCheck("admin key", in_thread(identity.admin_key)),
    DoctorCheck("control service", control_service.control_service, "correct auth.control_url, or DNS"),
    DoctorCheck("AWS credentials", identity.aws_credentials, _PROVIDER_AWAY),
    DoctorCheck("Bedrock API key", in_thread(identity.bedrock_key)),
    DoctorCheck("clock by the store", machine.clock_by_store, _STORE_AWAY),
    DoctorCheck("clock by Bedrock", machine.clock_by_bedrock),
    DoctorCheck("time zones", in_thread(machine.time_zones)),
    DoctorCheck("open files", in_thread(machine.open_files)),
    DoctorCheck("store file", in_thread(store_file.store_file), _DISK_AWAY),
    DoctorCheck("store is whole", in_thread(store_file.store_is_whole), _DISK_AWAY),
    DoctorCheck("DynamoDB", dynamodb.store_reached, _STORE_AWAY),
    DoctorCheck("tables", dynamodb.store_tables, _STORE_AWAY),
    DoctorCheck("permissions", dynamodb.store_permissions, _STORE_AWAY),
    DoctorCheck("org of the identity", registered.identity_org, _STORE_AWAY),
    DoctorCheck("journal", in_thread(journal.journal_folder), _DISK_AWAY),
    DoctorCheck("journal's room", in_thread(journal.journal_room), _DISK_AWAY),
    DoctorCheck("journal's leftovers", in_thread(journal.journal_leftovers), _DISK_AWAY),
    DoctorCheck("certificate", in_thread(ports.certificate)),
)
_AFTER = (
    DoctorCheck("price list", outside.price_list),
    DoctorCheck("webhook", outside.webhook, "correct alerts.webhook.url, or DNS"),
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


def checks_of(context: DoctorContext) -> list[DoctorCheck]:
    upstream = upstream_checks(context) if context.has_data_port else []
    checks = [*_BEFORE, *ports.port_checks(context), *upstream, *_AFTER]
    return [check for check in checks if check.name not in _NOT_OF[context.role]]
