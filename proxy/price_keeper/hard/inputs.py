"""The most tokens that a request's input can be, or what in it Bedrock has to count. Pure."""

from __future__ import annotations

from price_keeper.hard.forms import RequestForm
from price_keeper.hard.members import read_members
from price_keeper.hard.reading import StrictBody
from price_keeper.hard.tally import TokenBound


def measure_input(form: RequestForm, parsed: StrictBody) -> TokenBound:
    """Raises InvalidRequest for what is not known to be bounded."""
    bound = TokenBound(parsed.canonical)
    read_members(bound, parsed.document, form.members, "the body")
    return bound
