"""What whoever asks the control API has to know of it: names of headers, and bounds. Pure, and loads nothing."""

API_KEY, AUTHORIZATION = "X-API-Key", "Authorization"
RETRIEVAL_TOKEN = "X-Retrieval-Token"  # noqa: S105 - the name of a header
USUAL_GRACE_HOURS = 24
MOST_AT_ONCE = 100  # orgs or apps of a list
MOST_BYTES = 256 * 1024  # an org with every setting has a few thousand, a hundred usages some forty thousand
LONGEST_NAME = 64  # characters of a name that is not ours
