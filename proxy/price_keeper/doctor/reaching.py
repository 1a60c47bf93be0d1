"""How to mend what cannot be reached, by the stage at which it failed."""

from __future__ import annotations

from price_keeper.doctor.asking import EndpointUnreachable, ProbeStage
from price_keeper.doctor.doctor_checks import Finding, trouble
from price_keeper.forwarding.upstream import UpstreamEndpoint


def build_unreachable_finding(failure: EndpointUnreachable, endpoint: UpstreamEndpoint, keys: str) -> Finding:
    """`keys` are those of the configuration that say where it is."""
    return trouble(str(failure), _build_remedy(failure.stage, endpoint, keys))


def _build_remedy(stage: ProbeStage, endpoint: UpstreamEndpoint, keys: str) -> str:
    match stage:
        case ProbeStage.NAME:
            return f"correct {keys}, or let this machine resolve the name: getent hosts {endpoint.host}"
        case ProbeStage.CONNECTION:
            way = "security group, firewall, NAT or VPC endpoint"
            return f"let this machine out to port {endpoint.port} of {endpoint.host} ({way}), or correct {keys}"
        case ProbeStage.TLS:
            return f"trust its authority (SSL_CERT_FILE, or install ca-certificates), or correct {keys}"
        case ProbeStage.ANSWER:
            return f"find out what listens there, or correct {keys}"
