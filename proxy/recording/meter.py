"""One call's money: its intent before it is sent, its answer watched on the way, its receipt before the last byte."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from proxy.exchange import Header
from proxy.forwarding.forwarder import Target
from proxy.forwarding.model_path import Operation
from proxy.metering.pricing import Priced
from proxy.metering.reading import Reader, reader_of
from proxy.metering.usage import Usage
from proxy.recording.entries import Account, Intent, Receipt, counts_of
from proxy.recording.expected import Expected
from proxy.recording.journal import Journal

MOST_PICO = 10**18  # for one call; sums of many still fit into 64 bits
CONTENT_TYPE, REQUEST_ID = b"content-type", b"x-amzn-requestid"

_log = logging.getLogger("proxy.recording")


@dataclass(frozen=True, slots=True)
class Price:
    """How what was used becomes money, where that is written, and what each piece is taken to cost until then."""

    of: Callable[[Usage], Priced]
    told: str
    input: int = 0
    output: int = 0
    unit: int = 0
    job: int = 0

    def guess(self, usage: Usage) -> int:
        units = sum(usage.units.values()) if usage.units else 0
        return self.job + usage.input * self.input + usage.output * self.output + units * self.unit


PriceAt = Callable[[Target], Price]


class Meter:
    """The tap on one call's answer. `price_at` is asked for each place that the call is sent to."""

    __slots__ = ("_expected", "_format", "_guess", "_is_sent", "_is_settled", "_journal", "_number", "_operation",
                 "_price", "_price_at", "_reader", "_request_id", "_status")  # fmt: skip

    def __init__(
        self,
        journal: Journal,
        expected: Expected,
        account: Account,
        operation: Operation,
        format: str,
        price_at: PriceAt,
        first: Target,
        guess: Usage,
        now: float,
    ) -> None:
        """`guess` is what the call is taken to use if that is never told. Raises CannotRecord: do not send it then."""
        self._journal = journal
        self._expected = expected
        self._operation = operation
        self._format = format
        self._price_at = price_at
        self._price = price_at(first)
        self._guess = guess
        self._reader: Reader | None = None
        self._request_id = ""
        self._status = 0
        self._is_sent = self._is_settled = False
        intent = Intent(account, int(now * 1000), guess.input, guess.output, self._price.guess(guess))
        self._number = journal.intend(intent)

    @property
    def price_source(self) -> str:
        return self._price.told.partition(" ")[0]

    def sent_to(self, target: Target) -> None:
        self._price = self._price_at(target)
        self._is_sent = True

    def not_carried_out(self) -> None:
        """Where it was sent it has surely not been carried out."""
        self._is_sent = False

    def head(self, status: int, headers: list[Header]) -> None:
        self._status = status
        kind = b""
        for name, value in headers:
            if name == REQUEST_ID:
                self._request_id = value.decode("latin-1")
            elif name == CONTENT_TYPE:
                kind = value
        self._reader = reader_of(self._operation, self._format, kind, headers)

    def data(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.feed(data)

    def end(self, is_whole: bool) -> None:
        if self._is_settled:
            return
        try:
            receipt = self._receipt(is_whole)
        except Exception:
            # The answer must reach its caller, and unknown spend never counts as nothing.
            _log.exception("an answer's usage could not be read, and is estimated")
            receipt = self._estimated(None, "fault")
        self._settle(receipt)

    def close(self) -> None:
        """At the very end, whatever became of the call."""
        if self._is_settled:
            return
        if self._reader is not None:
            self.end(False)
        else:
            self._settle(self._estimated(None, "no answer") if self._is_sent else None)

    def _settle(self, receipt: Receipt | None) -> None:
        self._is_settled = True
        self._journal.record(self._number, receipt)

    def _receipt(self, is_whole: bool) -> Receipt | None:
        reader = self._reader
        if reader is None:
            return self._estimated(None, "no answer")
        usage = reader.usage()  # which may have come before the cut
        if usage is not None:
            if usage.output:
                self._expected.learn(usage.output)
            return self._known(usage)
        if self._status >= 300:
            return None  # an error that tells of no usage has none
        if reader.has_failed and not reader.estimate_output():
            return None  # one that came as a stream's first event neither
        if not is_whole:
            _log.warning("a stream of Bedrock's was cut or broken, and is estimated: request %s", self._request_id)
        return self._estimated(reader, "silent" if is_whole else "cut")

    def _known(self, usage: Usage) -> Receipt:
        priced = self._price.of(usage)
        if priced.pico > MOST_PICO:
            _log.error("an answer would cost more than a million dollars; its usage is not believed: %s", usage)
            return self._estimated(None, "absurd")
        return Receipt(counts_of(usage, priced.pico), self._about(usage, priced))

    def _estimated(self, reader: Reader | None, why: str) -> Receipt:
        usage = self._guess if reader is None else self._seen(reader)
        priced = self._price.of(usage)
        about = self._about(usage, priced) | {"why": why}
        return Receipt(counts_of(usage, priced.pico, is_estimated=True), about)

    def _seen(self, reader: Reader) -> Usage:
        told = reader.partial() or self._guess
        return told._replace(output=max(told.output if told is not self._guess else 0, reader.estimate_output()))

    def _about(self, usage: Usage, priced: Priced) -> dict[str, str]:
        """Only what is not as usual, but for the names by which it can be looked up."""
        about = {"request": self._request_id, "price": self._price.told}
        if usage.tier:
            about["tier"] = usage.tier
        if usage.latency:
            about["latency"] = usage.latency
        if priced.flags:
            about["flags"] = " ".join(sorted(priced.flags))
        return about
