"""A model's turn: the prompt is counted against the cache, and answered."""

from __future__ import annotations

from bedrock_simulator.call import SimulatedCall
from bedrock_simulator.clock import Clock
from bedrock_simulator.generation import Completion, Prompt, complete
from bedrock_simulator.models import Model
from bedrock_simulator.prompt_cache import PromptCache
from bedrock_simulator.refusals import AwsError


class ModelRunner:
    def __init__(self, clock: Clock, min_cache_tokens: int) -> None:
        self._clock = clock
        self._cache = PromptCache(clock.monotonic, min_cache_tokens)

    def run(self, call: SimulatedCall, model: Model, prompt: Prompt) -> Completion:
        if not model.can_cache and any(piece.ttl for piece in prompt.pieces):
            raise AwsError(
                "AccessDeniedException",
                "You invoked an unsupported model or your request did not allow prompt caching. See the documentation "
                "for more information.",
            )
        prompt_usage = self._cache.read_and_write(model.id, prompt.pieces)
        return complete(prompt, prompt_usage, call.compute_seed(model), call.fault_spec, int(self._clock.now()))
