"""All checks in the order of the report, and which checks each role skips."""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.app import Role
from price_keeper.doctor import auth_checks, disk_checks, dynamodb_checks, external_checks, machine_checks, port_checks
from price_keeper.doctor.bedrock_checks import build_bedrock_checks
from price_keeper.doctor.doctor_checks import DoctorCheck, in_thread
from price_keeper.doctor.doctor_context import DoctorContext

_STORE_REMEDY = (
    "let this machine reach DynamoDB (a VPC endpoint, a firewall), or correct store.endpoint and store.region"
)
_DISK_REMEDY = "its disk hangs: check it with df and dmesg, or name another one in the configuration"
_PROVIDER_REMEDY = "the credential provider hangs: check AWS_PROFILE, credential_process, or the metadata service"

_COMMON_CHECKS = (
    DoctorCheck("token keys", in_thread(auth_checks.check_token_keys)),
    DoctorCheck("admin key", in_thread(auth_checks.check_admin_key)),
    DoctorCheck("control service", auth_checks.check_control_service, "correct auth.control_url, or DNS"),
    DoctorCheck("AWS credentials", auth_checks.check_aws_credentials, _PROVIDER_REMEDY),
    DoctorCheck("Bedrock API key", in_thread(auth_checks.check_bedrock_key)),
    DoctorCheck("clock by the store", machine_checks.check_clock_by_store, _STORE_REMEDY),
    DoctorCheck("clock by Bedrock", machine_checks.check_clock_by_bedrock),
    DoctorCheck("time zones", in_thread(machine_checks.check_time_zones)),
    DoctorCheck("open files", in_thread(machine_checks.check_open_files)),
    DoctorCheck("store file", in_thread(disk_checks.check_store_file), _DISK_REMEDY),
    DoctorCheck("store is whole", in_thread(disk_checks.check_store_integrity), _DISK_REMEDY),
    DoctorCheck("DynamoDB", dynamodb_checks.check_dynamodb_reachable, _STORE_REMEDY),
    DoctorCheck("tables", dynamodb_checks.check_tables, _STORE_REMEDY),
    DoctorCheck("permissions", dynamodb_checks.check_permissions, _STORE_REMEDY),
    DoctorCheck("org of the identity", auth_checks.check_identity_org, _STORE_REMEDY),
    DoctorCheck("journal", in_thread(disk_checks.check_journal_folder), _DISK_REMEDY),
    DoctorCheck("journal's room", in_thread(disk_checks.check_journal_space), _DISK_REMEDY),
    DoctorCheck("journal's leftovers", in_thread(disk_checks.check_unsent_segments), _DISK_REMEDY),
    DoctorCheck("certificate", in_thread(port_checks.check_certificate)),
)
_FINAL_CHECKS = (
    DoctorCheck("price list", external_checks.check_price_list),
    DoctorCheck("webhook", external_checks.check_webhook, "correct alerts.webhook.url, or DNS"),
)


# All other checks apply to every role: a control service too has a journal of writes for the store.
_DATA_PORT_CHECKS = frozenset(
    ("Bedrock API key", "clock by Bedrock", "open files", "org of the identity", "certificate", "price list")
)
_EXCLUDED_BY_ROLE: Mapping[Role, frozenset[str]] = {
    "both": frozenset(("control service",)),
    "sidecar": frozenset(("admin key",)),
    "control": _DATA_PORT_CHECKS | {"control service"},
}


def build_checks(context: DoctorContext) -> list[DoctorCheck]:
    upstream = build_bedrock_checks(context) if context.has_data_port else []
    checks = [*_COMMON_CHECKS, *port_checks.build_port_checks(context), *upstream, *_FINAL_CHECKS]
    return [check for check in checks if check.name not in _EXCLUDED_BY_ROLE[context.role]]
