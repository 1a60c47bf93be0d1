"""Header names and limits of the control API that its clients, such as the command line, need too. Imports nothing."""

from __future__ import annotations

API_KEY_HEADER, AUTHORIZATION_HEADER = "X-API-Key", "Authorization"
RETRIEVAL_TOKEN_HEADER = "X-Retrieval-Token"  # noqa: S105 - the name of a header
DEFAULT_GRACE_HOURS = 24
MAX_PAGE_SIZE = 100  # orgs or apps on one page of a list
MAX_BODY_BYTES = 256 * 1024  # an org with every setting has a few thousand bytes, a hundred usages some forty thousand
MAX_ECHOED_NAME_LENGTH = 64  # characters of an unknown name that an error message repeats
