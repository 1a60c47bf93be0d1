"""The forms in which Bedrock takes the id of one model. Pure.

    anthropic.claude-sonnet-4-6                                                       the base id
    us.anthropic.claude-sonnet-4-6                                                    a cross-region inference profile
    arn:aws:bedrock:us-east-1::foundation-model/anthropic.claude-sonnet-4-6           and the ARNs of both
    arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-sonnet-4-6

The ARN of an application inference profile does not say which model it is of; only Bedrock knows.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

# Where a cross-region inference profile may run a call. Written out, since a provider may have a short name too.
PROFILE_PREFIXES: Final = ("us", "eu", "apac", "amer", "global", "jp", "au", "ca", "us-gov")

# Callers choose the ids. An entry with the longest one takes 5 kB.
_CACHE_SIZE: Final = 1024

_FORM = re.compile(
    r"(?:arn:aws[a-z-]*:bedrock:[a-z0-9-]*:(?:[0-9]{12})?:(?:foundation-model|inference-profile)/)?"
    rf"(?:(?:{'|'.join(PROFILE_PREFIXES)})\.)?(?P<base>[a-z0-9-]+\.[A-Za-z0-9._:-]+)"
)
_APPLICATION_PROFILE = re.compile(
    r"arn:aws[a-z-]*:bedrock:(?P<region>[a-z]{2,8}(?:-[a-z]{1,12}){1,3}-[0-9]{1,2}):[0-9]{12}"
    r":application-inference-profile/[A-Za-z0-9._:-]{1,128}"
)


@lru_cache(_CACHE_SIZE)
def find_base_model(model_id: str) -> str:
    """The base id of a model in any form; an id that is in none of these forms stands for itself."""
    form = _FORM.fullmatch(model_id)
    return model_id if form is None else form["base"]


def is_system_profile_arn(model_id: str) -> bool:
    """Whether this is the ARN of a cross-region inference profile, which says which model it is of."""
    return ":inference-profile/" in model_id


def find_profile_region(model_id: str) -> str | None:
    """The region of an application inference profile's ARN; None for any other id."""
    arn = _APPLICATION_PROFILE.fullmatch(model_id)
    return None if arn is None else arn["region"]
