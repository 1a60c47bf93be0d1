"""A simulator of Amazon Bedrock's data plane, for development and tests without an AWS account.

    async with simulated_bedrock() as bedrock: ...     on a free port of 127.0.0.1: `bedrock.url`, `bedrock.ledger`
    python -m bedrock_simulator --port 9000              a process of its own, its ledger at GET /_simulator/ledger

    server            HTTP: receives a request, adds it to the ledger, authenticates it, sends the response
    routes            the operation that a path names
    signatures        SigV4 and API keys, verified with botocore's own implementation
    service           dispatches a call to its operation
    converse, invoke, chat_completions, guardrails, async_jobs             the operations
    inference_profiles   CreateInferenceProfile and GetInferenceProfile, of the control plane
    families/         the request and response bodies of each model family of InvokeModel
    generation, replies, tokens, prompt_cache                              the text of a simulated model, and its usage
    fault_spec        the `x-simulate-` headers: faults, pacing and reported usage
    fault_injection   how a fault changes a response body
    response_writer   writes a response to the socket
    request_metadata  Bedrock's rules for request metadata
    ledger            every request that arrived, with its outcome and usage

The same request always gets the same text, so tests can compare it. Time comes from an injected clock.

Headers of a request select faults; without any it is answered as by a healthy Bedrock. `SimulatedBedrock.always` and
`.plan` (or `PUT /_simulator/plan`) set the same options for callers whose headers do not reach the simulator:

    x-simulate-fault            throttle, 5xx (with -status: 500, 502, 503 or 504), model-not-ready, model-timeout,
                                model-error, quota, access-denied: an error response;
                                slow-first-byte (with -delay-ms): the head at once, the body later;
                                stall, cut, reset: silence, a FIN, an RST, before the head or where -after-* says;
                                half-head: the connection ends within the response's head;
                                bad-crc, exception-frame (with -exception): within a stream
    x-simulate-after-frames     how much of a body is sent before the fault: frames of a stream,
    x-simulate-after-bytes      or bytes of the body
    x-simulate-delay-ms         how long a stall or the wait for a first byte lasts; a stall without it never ends
    x-simulate-times            only the first so many requests with one key fail; the key is
    x-simulate-key              this, or else the amz-sdk-invocation-id, which is the same for all retries of an SDK
    x-simulate-latency-ms       time before the head, and the latency that the response reports
    x-simulate-frame-ms         time before each frame of a stream but the first
    x-simulate-output-tokens    the length of the output; the request's own maximum still applies
    x-simulate-input-tokens, -cache-read-tokens, -cache-write-5m-tokens, -cache-write-1h-tokens: the reported counts
    x-simulate-usage            none: a response without usage; null, zero, negative, text, doubled, no-output,
                                zero-output: a response whose usage is wrong in this way
    x-simulate-tier, -performance   the service tier and the latency mode that the response reports
"""

from bedrock_simulator.ledger import Entry, Ledger
from bedrock_simulator.server import SimulatedBedrock, simulated_bedrock
from bedrock_simulator.signatures import DEFAULT_KEYS, Keys

__all__ = ["DEFAULT_KEYS", "Entry", "Keys", "Ledger", "SimulatedBedrock", "simulated_bedrock"]
