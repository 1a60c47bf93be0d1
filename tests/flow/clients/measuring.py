"""What each client does when it is answered and when it is refused, and how often it asks; all clients at once."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from tests.support.client_stage import BROKEN, CLOSED, CUT, SPENT, THROTTLED, ClientStage
from tests.support.clients import BEARER, CLIENTS, CONTAINER, SESSION, CallRound, Client, ClientCall, ClientOutcome, ask
from tests.support.counting_proxy import CountingProxies, CountingProxy

AT_ONCE = 4
TOO_LONG = "long 26000000"

# What goes wrong, in the words of the documentation.
BAD_TOKEN, EXPIRED_TOKEN, UNKNOWN_LABEL, TOO_LARGE = "bad token", "expired token", "unknown label", "body too large"
UNREACHABLE, THROTTLING, QUOTA = "Bedrock unreachable", "throttled", "quota spent"
CUT_STREAM, CUT_ANSWER = "stream cut", "answer cut"

_CALLS: dict[str, ClientCall] = {
    BAD_TOKEN: ask("premium"),
    EXPIRED_TOKEN: ask("premium"),
    UNKNOWN_LABEL: ask("unknown"),
    TOO_LARGE: ask("premium", TOO_LONG),
    UNREACHABLE: ask(CLOSED),
    THROTTLING: ask(THROTTLED),
    QUOTA: ask(SPENT),
    CUT_STREAM: ask(BROKEN, stream=True),
    CUT_ANSWER: ask(CUT),
}
SITUATIONS = tuple(_CALLS)


def situations_of(client: Client) -> list[str]:
    return [each for each in SITUATIONS if client.streams or each != CUT_STREAM]


@dataclass(frozen=True)
class Trouble:
    tries: int
    outcome: ClientOutcome


@dataclass(frozen=True)
class Measured:
    version: str
    answers: dict[str, list[ClientOutcome]]  # by the way to say who calls: as a whole, then as a stream
    troubles: dict[str, Trouble]  # by situation

    @property
    def ways(self) -> list[str]:
        """Those that work over plain http."""
        return [way for way, outcomes in self.answers.items() if all(each.error is None for each in outcomes)]


def measured_all(staged: ClientStage, doors: CountingProxies) -> dict[Client, Future[Measured]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {client: pool.submit(_measured, client, staged, doors) for client in CLIENTS if client.is_installed}


def _measured(client: Client, staged: ClientStage, doors: CountingProxies) -> Measured:
    ways = client.auth_methods if client.path else (SESSION, CONTAINER, BEARER)
    situations = situations_of(client)
    in_trouble = [_in_trouble(client, situation, staged, doors) for situation in situations]
    played = client.play(
        *(CallRound(staged.environ(client, way), _both(client)) for way in ways),
        *(each for each, _ in in_trouble),
    )
    answers = dict(zip(ways, played.rounds, strict=False))
    troubles = {
        situation: Trouble(door.requests, outcomes[0])
        for situation, (_, door), outcomes in zip(situations, in_trouble, played.rounds[len(ways) :], strict=True)
    }
    return Measured(played.version, answers, troubles)


def _both(client: Client) -> list[ClientCall]:
    return [ask("premium"), ask("premium", stream=True)] if client.streams else [ask("premium")]


def _in_trouble(
    client: Client, situation: str, staged: ClientStage, doors: CountingProxies
) -> tuple[CallRound, CountingProxy]:
    door = doors.open_proxy(staged.url)
    token = {BAD_TOKEN: "nonsense", EXPIRED_TOKEN: staged.token(-1)}.get(situation)
    return CallRound(staged.environ(client, client.auth_methods[0], door.url, token), [_CALLS[situation]]), door
