"""A stand-in for Amazon Bedrock's data plane: what development and tests talk to where AWS itself cannot be had.

    async with simulated_bedrock() as bedrock: ...     on a free port of 127.0.0.1: `bedrock.url`, `bedrock.ledger`
    python -m bedrock_simulator --port 9000              a process of its own, its ledger at GET /_simulator/ledger

    server         sockets: takes a request, notes it in the ledger, checks who asks, sends the answer
    routes         which operation a path names
    signatures     SigV4 and API keys, checked with botocore's own arithmetic
    service        one function for each operation: a call in, an answer out
    converse, invoke, chat, guardrails, async_jobs                         the operations
    families/      the request and answer bodies of each family of models that InvokeModel knows
    generation, speech, tokens, prompt_cache                               what a "model" says, and what it costs
    wishes         the `x-simulate-` headers: faults, pacing, and what only an answer reveals
    spoiling       how a fault damages an answer
    sending        an answer onto a socket
    metadata       the rules of what callers note on their requests
    ledger         every request that arrived, and what became of it

The same request gets the same words, so tests may compare them. Time comes from an injected clock.

A request says how it wants to be treated in headers; without any it is answered as by a healthy Bedrock.
`SimulatedBedrock.always` and `.plan` (or `PUT /_simulator/plan`) say the same for callers whose headers do not arrive:

    x-simulate-fault            throttle, 5xx (with -status: 500, 502, 503 or 504), model-not-ready, model-timeout,
                                model-error, quota, access-denied: an error instead of an answer;
                                slow-first-byte (with -delay-ms): the head at once, the body later;
                                stall, cut, reset: silence, an end, an RST, before the head or where -after-* says;
                                half-head: the connection ends within the response's head;
                                bad-crc, exception-frame (with -exception): within a stream
    x-simulate-after-frames     how much of a body passes before its fault strikes: frames of a stream,
    x-simulate-after-bytes      or bytes of its body
    x-simulate-delay-ms         how long a stall or the wait for a first byte lasts; a stall without it never ends
    x-simulate-times            only so many of the requests with one key fail; the key is
    x-simulate-key              this, or else the amz-sdk-invocation-id, which stays the same over an SDK's retries
    x-simulate-latency-ms       time before the head, also what the answer calls its latency
    x-simulate-frame-ms         time before each frame of a stream but the first
    x-simulate-output-tokens    how much the model wants to say; the request's own maximum still cuts it
    x-simulate-input-tokens, -cache-read-tokens, -cache-write-5m-tokens, -cache-write-1h-tokens: what is reported
    x-simulate-usage            none: an answer that does not say what it used; null, zero, negative, text, doubled,
                                no-output, zero-output: one that says it in this way
    x-simulate-tier, -performance   the service tier and the latency mode that the answer reports
"""

from bedrock_simulator.ledger import Entry, Ledger
from bedrock_simulator.server import SimulatedBedrock, simulated_bedrock
from bedrock_simulator.signatures import DEFAULT_KEYS, Keys

__all__ = ["DEFAULT_KEYS", "Entry", "Keys", "Ledger", "SimulatedBedrock", "simulated_bedrock"]
