"""The operations CreateInferenceProfile and GetInferenceProfile of Bedrock's control plane.

The same server answers them, where Bedrock has a host of its own for them. Every known model has its system-defined
profiles; application profiles are those that were created here.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from bedrock_simulator.aws_errors import AwsError, validation_error
from bedrock_simulator.clock import Clock
from bedrock_simulator.models import resolve_model
from bedrock_simulator.simulated_call import SimulatedCall, SimulatedResponse

_ACCOUNT = "123456789012"
_MAX_PROFILES = 1000  # beyond this the oldest are dropped
# Regions that a system-defined profile routes to, for all of its kind; a global one names one without a region, too.
_REGIONS = ("us-east-1", "us-west-2")
_SOURCE = re.compile(r"arn:aws[a-z-]*:bedrock:([a-z0-9-]*):(?:\d{12})?:(foundation-model|inference-profile)/(.+)")


class InferenceProfiles:
    def __init__(self, clock: Clock, region: str) -> None:
        self._clock = clock
        self._region = region
        self._profiles: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by ARN

    def create_profile(self, call: SimulatedCall) -> SimulatedResponse:
        body = call.parse_body()
        name, source = body["inferenceProfileName"], body["modelSource"]["copyFrom"]
        match = _SOURCE.fullmatch(source)
        if match is None:
            raise validation_error("The provided model source is invalid.")
        region, kind, model = match.groups()
        models = [source] if kind == "foundation-model" else self._list_model_arns(model)
        resolve_model(model)
        identifier = sha256(b"%d %s" % (len(self._profiles), call.body)).hexdigest()[:12]
        arn = f"arn:aws:bedrock:{region or self._region}:{_ACCOUNT}:application-inference-profile/{identifier}"
        self._profiles[arn] = self._describe(name, arn, identifier, models, "APPLICATION")
        if len(self._profiles) > _MAX_PROFILES:
            self._profiles.popitem(last=False)
        return SimulatedResponse(call.render({"inferenceProfileArn": arn, "status": "ACTIVE"}), status=201)

    def get_profile(self, call: SimulatedCall) -> SimulatedResponse:
        (wanted,) = call.route.labels
        found = self._profiles.get(wanted)
        if found is None and ":application-inference-profile/" in wanted:
            raise AwsError("ResourceNotFoundException")
        return SimulatedResponse(call.render(found or self._describe_system_defined(wanted.rpartition("/")[2])))

    def _describe_system_defined(self, identifier: str) -> dict[str, Any]:
        arn = f"arn:aws:bedrock:{self._region}:{_ACCOUNT}:inference-profile/{identifier}"
        return self._describe(identifier, arn, identifier, self._list_model_arns(identifier), "SYSTEM_DEFINED")

    def _list_model_arns(self, profile: str) -> list[str]:
        model = resolve_model(profile).name
        if model == profile:  # no profile, but a model's own id
            raise AwsError("ResourceNotFoundException")
        regions = ("", *_REGIONS) if profile.startswith("global.") else _REGIONS
        return [f"arn:aws:bedrock:{region}::foundation-model/{model}" for region in regions]

    def _describe(self, name: str, arn: str, identifier: str, models: list[str], kind: str) -> dict[str, Any]:
        now = datetime.fromtimestamp(self._clock.now(), UTC).isoformat()
        return {
            "inferenceProfileName": name,
            "inferenceProfileArn": arn,
            "inferenceProfileId": identifier,
            "models": [{"modelArn": model} for model in models],
            "status": "ACTIVE",
            "type": kind,
            "createdAt": now,
            "updatedAt": now,
        }
