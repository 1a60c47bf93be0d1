"""Composes the control API of one process from what else runs in it."""

from __future__ import annotations

from collections.abc import Mapping

from price_keeper.auth.clients import ClientVerifier
from price_keeper.auth.container import LocalCredentialIssuer
from price_keeper.auth.failures import LoginThrottle
from price_keeper.auth.lookups import LookupThrottle
from price_keeper.auth.page_sessions import PageSessions
from price_keeper.auth.revocation import RevocationList
from price_keeper.auth.sessions import RefreshSessions
from price_keeper.auth.tokens import TokenService
from price_keeper.clock import Clock
from price_keeper.config import Config
from price_keeper.control.access import Access, Verify, admin_mark, load_admin_key
from price_keeper.control.connections import DEFAULT, Limits
from price_keeper.control.page.state import PageState
from price_keeper.control.parts import RETRIEVALS_OF_A_TOKEN, RETRIEVALS_OF_ALL, RETRIEVALS_OF_AN_ADDRESS, Parts
from price_keeper.control.rates import LocalRates, Rates, SharedRates
from price_keeper.limits.leasing import RateLeaseManager
from price_keeper.model import Caller
from price_keeper.recording.submitted import SubmissionRecorder
from price_keeper.selection.standings import BudgetRegistry
from price_keeper.stores.contract import Store

CALLS_AT_ONCE, CALLS_PER_SECOND = 200, 20.0  # by one client or administrator


def parts_of(
    config: Config,
    environ: Mapping[str, str],
    store: Store,
    clock: Clock,
    standings: BudgetRegistry,
    tokens: TokenService,
    revocation: RevocationList,
    clients: ClientVerifier,
    rates: Rates | None = None,
    leasing: RateLeaseManager | None = None,
    wrong_secrets: LoginThrottle | None = None,
    limits: Limits = DEFAULT,
) -> Parts:
    """`wrong_secrets` are those of the data port too. Raises ConfigError where the admin key cannot be had."""
    wrong_secrets = wrong_secrets or LoginThrottle(clock.monotonic)
    key = load_admin_key(config.auth, environ)
    page_sessions = PageSessions(tokens, revocation, admin_mark(key))
    return Parts(
        config=config,
        store=store,
        clock=clock,
        standings=standings,
        submissions=SubmissionRecorder(store, clock),
        access=Access(key, _verifying(tokens, revocation), wrong_secrets, page_sessions, clock),
        rates=rates or _rates(clock, leasing),
        clients=clients,
        wrong_secrets=wrong_secrets,
        credentials=LocalCredentialIssuer(clients, tokens, clock.now, revocation.is_revoked),
        tokens=tokens,
        sessions=RefreshSessions(store, tokens, revocation, clock, config.auth.max_sessions),
        page_sessions=page_sessions,
        retrieval_pace=LookupThrottle(clock, RETRIEVALS_OF_AN_ADDRESS, RETRIEVALS_OF_ALL),
        marked_retrieval_pace=LookupThrottle(clock, RETRIEVALS_OF_A_TOKEN, RETRIEVALS_OF_ALL),
        page=PageState(limits=limits),
    )


def _rates(clock: Clock, leasing: RateLeaseManager | None) -> Rates:
    local = LocalRates(clock.monotonic, CALLS_AT_ONCE, CALLS_PER_SECOND)
    return local if leasing is None else SharedRates(leasing, local, CALLS_AT_ONCE, CALLS_PER_SECOND)


def _verifying(tokens: TokenService, revocation: RevocationList) -> Verify:
    async def verify(token: str) -> Caller:
        claims = tokens.verify_access(token)
        if not revocation.is_known_valid(claims):
            await revocation.check_store(claims)
        return claims.caller

    return verify
