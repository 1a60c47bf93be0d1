"""Dispatches a call to its operation: a `SimulatedCall` in, a `SimulatedResponse` out, or an `AwsError` raised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bedrock_simulator import chat_completions, converse, guardrails, invoke, responses
from bedrock_simulator.async_jobs import AsyncJobs
from bedrock_simulator.aws_errors import malformed_request
from bedrock_simulator.clock import Clock
from bedrock_simulator.generation import ModelRunner
from bedrock_simulator.inference_profiles import InferenceProfiles
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse


class Service:
    def __init__(self, clock: Clock, region: str, min_cache_tokens: int) -> None:
        runner = ModelRunner(clock, min_cache_tokens)
        jobs = AsyncJobs(clock, region)
        profiles = InferenceProfiles(clock, region)
        self._operations: dict[str, Callable[[SimulatedCall], SimulatedResponse]] = {
            "ApplyGuardrail": guardrails.apply_guardrail,
            "ChatCompletions": partial(chat_completions.complete_chat, runner),
            "Converse": partial(converse.converse, runner),
            "ConverseStream": partial(converse.converse_stream, runner),
            "CountTokens": converse.count_tokens,
            "CreateInferenceProfile": profiles.create_profile,
            "GetAsyncInvoke": jobs.get_job,
            "GetInferenceProfile": profiles.get_profile,
            "InvokeGuardrailChecks": guardrails.run_guardrail_checks,
            "InvokeModel": partial(invoke.invoke, runner),
            "InvokeModelWithResponseStream": partial(invoke.invoke_stream, runner),
            "ListAsyncInvokes": jobs.list_jobs,
            "Responses": partial(responses.respond, runner),
            "StartAsyncInvoke": jobs.start_job,
        }

    def handle(self, call: SimulatedCall) -> SimulatedResponse:
        """Run an operation. Operations do not check the types of members: such an error is the caller's mistake."""
        try:
            return self._operations[call.route.operation](call)
        except (AttributeError, KeyError, TypeError) as error:
            raise malformed_request(f"#: a member has an unexpected type ({error})") from error
