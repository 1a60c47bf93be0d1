"""What whoever asks the control API has to know of it: names of headers, and bounds. Pure, and loads nothing."""

API_KEY_HEADER, AUTHORIZATION_HEADER = "X-API-Key", "Authorization"
RETRIEVAL_TOKEN_HEADER = "X-Retrieval-Token"  # noqa: S105 - the name of a header
DEFAULT_GRACE_HOURS = 24
MAX_PAGE_SIZE = 100  # orgs or apps of a list
MAX_BODY_BYTES = 256 * 1024  # an org with every setting has a few thousand, a hundred usages some forty thousand
MAX_ECHOED_NAME_LENGTH = 64  # characters of a name that is not ours
