"""Errors in AWS's form: the type in a header, the message in the body. Pure.

`validation_error`, `malformed_request` and `constraint_violation` build the three kinds of ValidationException.
"""

from __future__ import annotations

from typing import Any

import orjson

# Services append a namespace to the type, which clients have to strip; the front end, which authenticates, does not.
_TYPE_SUFFIX = ":http://internal.amazon.com/coral/com.amazon.bedrock/"

SERVICE_ERRORS: dict[str, tuple[int, str]] = {
    "AccessDeniedException": (403, "You don't have access to the model with the specified model ID."),
    "ConflictException": (400, "The request conflicts with an earlier one that carried the same token."),
    "InternalServerException": (500, "The system encountered an unexpected error during processing. Try again."),
    "ModelErrorException": (424, "The model returned an error while it processed the request."),
    "ModelNotReadyException": (429, "The model is not ready for inference. Wait and try your request again."),
    "ModelStreamErrorException": (424, "The model returned an error while it streamed its answer."),
    "ModelTimeoutException": (408, "Model has timed out in processing the request. Try your request again."),
    "RequestEntityTooLargeException": (413, "The request body is too large."),
    "ResourceNotFoundException": (404, "The resource you requested does not exist."),
    "ServiceQuotaExceededException": (400, "Your request exceeds the service quota for your account."),
    "ServiceUnavailableException": (503, "Bedrock is unable to process your request."),
    "ThrottlingException": (429, "Too many requests, please wait before trying again."),
    "ValidationException": (400, "The input fails to satisfy the constraints of the service."),
}

AUTH_ERRORS: dict[str, tuple[int, str]] = {
    "ExpiredTokenException": (403, "The security token included in the request is expired"),
    "IncompleteSignatureException": (403, "The Authorization header is incomplete."),
    "InvalidSignatureException": (
        403,
        "The request signature we calculated does not match the signature you provided. Check your AWS Secret Access "
        "Key and signing method. Consult the service documentation for details.",
    ),
    "MissingAuthenticationTokenException": (403, "Missing Authentication Token"),
    "UnrecognizedClientException": (403, "The security token included in the request is invalid."),
}

_UNKNOWN_OPERATION = {"Output": {"__type": "com.amazon.coral.service#UnknownOperationException"}, "Version": "1.0"}


class AwsError(Exception):
    """Raised to answer a request with an error."""

    def __init__(self, kind: str, message: str | None = None, **more: Any) -> None:
        default = SERVICE_ERRORS.get(kind) or AUTH_ERRORS[kind]
        self.kind = kind
        self.status = default[0]
        self.message = message or default[1]
        self.error_type = kind if kind in AUTH_ERRORS else kind + _TYPE_SUFFIX
        self.body: dict[str, Any] = {"message": self.message, **more}
        super().__init__(f"{kind}: {self.message}")

    def render(self) -> tuple[dict[str, str], bytes]:
        return {"Content-Type": "application/json", "x-amzn-ErrorType": self.error_type}, orjson.dumps(self.body)


class InvalidApiKey(AwsError):
    """The check of API keys names its member `Message`, with a capital M, as IAM's own errors do."""

    def __init__(self) -> None:
        super().__init__("AccessDeniedException", "Authentication failed: Please make sure your API Key is valid.")
        self.error_type = self.kind
        self.body = {"Message": self.message}


class UnknownOperationError(AwsError):
    """No operation has this method and path."""

    def __init__(self) -> None:
        super().__init__("ResourceNotFoundException", "UnknownOperationException")
        self.error_type = "UnknownOperationException"
        self.body = dict(_UNKNOWN_OPERATION)


class GatewayError(AwsError):
    """An error of a load balancer in front of the service: without a type, and not JSON."""

    def __init__(self, status: int) -> None:
        super().__init__("ServiceUnavailableException")
        self.status = status

    def render(self) -> tuple[dict[str, str], bytes]:
        return {"Content-Type": "text/html"}, f"<html><body><h1>{self.status}</h1></body></html>".encode()


def validation_error(message: str) -> AwsError:
    return AwsError("ValidationException", message)


def malformed_request(problem: str) -> AwsError:
    return validation_error(f"Malformed input request: {problem}, please reformat your input and try again.")


def constraint_violation(value: object, name: str, rule: str) -> AwsError:
    """A member violates a constraint of its shape in the service model."""
    return validation_error(
        f"1 validation error detected: Value '{value}' at '{name}' failed to satisfy constraint: Member must {rule}"
    )
