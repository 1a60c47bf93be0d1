"""The most tokens that a request's input can be, or what in it Bedrock has to count. Pure."""

from __future__ import annotations

from proxy.hard.forms import Form
from proxy.hard.members import read_members
from proxy.hard.reading import Read
from proxy.hard.tally import Tally


def weighed(form: Form, read: Read) -> Tally:
    """Raises InvalidRequest for what is not known to be bounded."""
    tally = Tally(read.text)
    read_members(tally, read.document, form.members, "the body")
    return tally
