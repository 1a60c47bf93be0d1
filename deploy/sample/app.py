"""A sample app: it asks Bedrock for `premium` now and then, and prints which model its budget allowed.

It knows nothing of the sidecar. Where Bedrock is, AWS_ENDPOINT_URL_BEDROCK_RUNTIME tells the SDK.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

SECONDS = float(os.environ.get("SAMPLE_SECONDS", "5"))
MESSAGES = [{"role": "user", "content": [{"text": "Say hello."}]}]


def asked(client: object) -> str:
    try:
        answer = client.converse(modelId="premium", messages=MESSAGES)  # type: ignore[attr-defined]
    except (BotoCoreError, ClientError) as failure:
        return f"refused: {failure}"
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    served, mode = headers.get("x-price-keeper-label"), headers.get("x-price-keeper-mode")
    return f"answered by {served}, {mode}, {answer['usage']['outputTokens']} tokens"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the first process of a container has no default for it
    client = boto3.client("bedrock-runtime", config=Config(retries={"total_max_attempts": 2}))
    while True:
        print(asked(client), flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    main()
