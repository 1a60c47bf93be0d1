"""Composes the control API of one process from what else runs in it."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.auth.clients import Clients
from proxy.auth.container import ContainerCredentials
from proxy.auth.failures import WrongSecrets
from proxy.auth.lookups import Lookups
from proxy.auth.page_sessions import PageSessions
from proxy.auth.revocation import Revocation
from proxy.auth.sessions import Sessions
from proxy.auth.tokens import Tokens
from proxy.clock import Clock
from proxy.config import Config
from proxy.control.access import Access, Verify, admin_mark, load_admin_key
from proxy.control.connections import DEFAULT, Limits
from proxy.control.page.state import PageState
from proxy.control.parts import RETRIEVALS_OF_A_TOKEN, RETRIEVALS_OF_ALL, RETRIEVALS_OF_AN_ADDRESS, Parts
from proxy.control.rates import LocalRates, Rates, SharedRates
from proxy.limits.leasing import Leasing
from proxy.model import Caller
from proxy.recording.submitted import Submissions
from proxy.selection.standings import Standings
from proxy.stores.contract import Store

CALLS_AT_ONCE, CALLS_PER_SECOND = 200, 20.0  # by one client or administrator


def parts_of(
    config: Config,
    environ: Mapping[str, str],
    store: Store,
    clock: Clock,
    standings: Standings,
    tokens: Tokens,
    revocation: Revocation,
    clients: Clients,
    rates: Rates | None = None,
    leasing: Leasing | None = None,
    wrong_secrets: WrongSecrets | None = None,
    limits: Limits = DEFAULT,
) -> Parts:
    """`wrong_secrets` are those of the data port too. Raises ConfigError where the admin key cannot be had."""
    wrong_secrets = wrong_secrets or WrongSecrets(clock.monotonic)
    key = load_admin_key(config.auth, environ)
    page_sessions = PageSessions(tokens, revocation, admin_mark(key))
    return Parts(
        config=config,
        store=store,
        clock=clock,
        standings=standings,
        submissions=Submissions(store, clock),
        access=Access(key, _verifying(tokens, revocation), wrong_secrets, page_sessions, clock),
        rates=rates or _rates(clock, leasing),
        clients=clients,
        wrong_secrets=wrong_secrets,
        credentials=ContainerCredentials(clients, tokens, clock.now, revocation.is_revoked),
        tokens=tokens,
        sessions=Sessions(store, tokens, revocation, clock, config.auth.max_sessions),
        page_sessions=page_sessions,
        retrieval_pace=Lookups(clock, RETRIEVALS_OF_AN_ADDRESS, RETRIEVALS_OF_ALL),
        marked_retrieval_pace=Lookups(clock, RETRIEVALS_OF_A_TOKEN, RETRIEVALS_OF_ALL),
        page=PageState(limits=limits),
    )


def _rates(clock: Clock, leasing: Leasing | None) -> Rates:
    local = LocalRates(clock.monotonic, CALLS_AT_ONCE, CALLS_PER_SECOND)
    return local if leasing is None else SharedRates(leasing, local, CALLS_AT_ONCE, CALLS_PER_SECOND)


def _verifying(tokens: Tokens, revocation: Revocation) -> Verify:
    async def verify(token: str) -> Caller:
        claims = tokens.access(token)
        if not revocation.known(claims):
            await revocation.learned(claims)
        return claims.caller

    return verify
