"""What each port answers: statuses, headers and fields of requests of every kind, made as any program makes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.public_contract.shapes import Fields, fields_of
from tests.support.hard_budget_processes import noon_time_zone
from tests.support.observed_sidecar import ADMIN_KEY, APP, ORG, ObservedResponse, ObservedSidecar, ask, token
from tests.support.simulated import CHAT, CHAT_PATH, CLAUDE_BODY

TURN = {"messages": [{"role": "user", "content": [{"text": "hello there"}]}]}
SHORT = TURN | {"inferenceConfig": {"maxTokens": 50}}
HARD, LIMITED = (f"c0000000-0000-4000-8000-00000000000{each}" for each in "ab")
ORGS = "/api/v1/orgs"
OWN = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123"
_JOB = {"modelId": "film", "modelInput": {}, "outputDataConfig": {"s3OutputDataConfig": {"s3Uri": "s3://bucket/"}}}

LABELS = {
    "chat": {
        "model": CHAT["model"],
        "format": "openai",
        "prices_usd_per_1m": {"input": 1, "output": 2, "cache_read": 1, "cache_write_5m": 1},
    },
    "film": {
        "model": "amazon.nova-reel-v1:0",
        "format": "nova",
        "prices_usd_per_1m": {"input": 1, "output": 2},
        "price_usd_per_async_job": 1,
    },
}
_UNITS = (
    "content",
    "content_image",
    "topic",
    "sensitive_information",
    "contextual_grounding",
    "automated_reasoning",
    "check_content_filter",
    "check_prompt_attack",
    "check_sensitive_information",
)
GUARDRAILS = {"prices_usd_per_1000_units": dict.fromkeys(_UNITS, 1)}
_CHAIN = ["premium", "economy", "chat", "film", "own"]
_QUOTAS = dict.fromkeys([*_CHAIN, "guardrails", "async-jobs"], 100_000_000)

# Name, method, path, body. What the answers are stands in the contract, so a refusal is an answer as good as any.
DATA_PORT: tuple[tuple[str, str, str, Any], ...] = (
    ("converse", "POST", "/model/premium/converse", TURN),
    ("converse-stream", "POST", "/model/premium/converse-stream", TURN),
    ("invoke", "POST", "/model/premium/invoke", CLAUDE_BODY),
    ("invoke-stream", "POST", "/model/premium/invoke-with-response-stream", CLAUDE_BODY),
    ("count-tokens", "POST", "/model/premium/count-tokens", {"input": {"converse": TURN}}),
    ("bidirectional", "POST", "/model/premium/invoke-with-bidirectional-stream", {}),
    ("guardrail", "POST", "/guardrail/gr-1/version/1/apply", {"source": "INPUT", "content": [{"text": {"text": "a"}}]}),
    ("async-invoke", "POST", "/async-invoke", _JOB),
    ("chat completions", "POST", CHAT_PATH, CHAT | {"model": "chat"}),
    ("chat completions of no label", "POST", CHAT_PATH, CHAT | {"model": "nobody"}),
    ("asynchronous jobs", "GET", "/async-invoke", None),
    ("an app's own label", "POST", "/model/own/converse", TURN),
    ("no label", "POST", "/model/nobody/converse", TURN),
    ("no operation", "POST", "/model/premium/nothing", TURN),
    ("no body", "POST", "/model/premium/converse", None),
    ("credentials", "GET", "/credentials", None),
    ("no path of ours", "GET", "/nothing", None),
)


@dataclass
class Heard:
    status: int
    headers: list[str]
    error: str
    fields: Fields

    @classmethod
    def of(cls, answer: ObservedResponse) -> Heard:
        """Bedrock's own headers and fields are not ours: of its answers those headers alone that were added."""
        is_ours = answer.status >= 400 or not any(name.lower() == "server" for name in answer.headers)
        names = {name.lower() for name in answer.headers if name.lower() not in ("server", "date", "x-amzn-requestid")}
        added = names if is_ours else {name for name in names if "price-keeper" in name}
        error = str(answer.headers.get("x-amzn-errortype", ""))
        fields = fields_of([json.loads(answer.body)]) if is_ours and answer.body else {}
        return cls(answer.status, sorted(added), error, fields)

    def as_dict(self) -> dict[str, Any]:
        described: dict[str, Any] = {"status": self.status, "headers": ", ".join(self.headers)}
        if self.error:
            described["error"] = self.error
        return described | ({"fields": self.fields} if self.fields else {})


def data_port(it: ObservedSidecar, secret: dict[str, str]) -> dict[str, Any]:
    """In an order in which nothing is spent before it is asked for."""
    shown = {"Authorization": f"Bearer {token()}"}
    found = {}
    for name, method, path, body in DATA_PORT:
        headers = (
            {"Authorization": f"{secret['client_id']}:{secret['client_secret']}"} if name == "credentials" else shown
        )
        found[name] = Heard.of(ask(method, it.running.data + path, body, **headers)).as_dict()
    others: dict[str, ObservedResponse] = {
        "no token": ask("POST", f"{it.running.data}/model/premium/converse", TURN),
        "a token that is none": it.call(Authorization="Bearer of-no-token"),
        "wrong secret": ask("GET", f"{it.running.data}/credentials", Authorization="org-x:wrong"),
        "shadow": it.call(Authorization=f"Bearer {token('shadow')}"),
        "hard budget": it.call(Authorization=f"Bearer {token('shop', HARD)}", body=SHORT),
        "hard budget, answer of any length": it.call(Authorization=f"Bearer {token('shop', HARD)}"),
        "hard budget spent": it.call(Authorization=f"Bearer {token('poor', HARD)}", body=SHORT),
        "limit": it.call(Authorization=f"Bearer {token('shop', LIMITED)}"),
        "limit reached": _until(429, it, token("shop", LIMITED)),
        "quota spent": _until(400, it, token("poor")),
        "served by another label": _served_by_another(it),
    }
    return found | {name: Heard.of(answer).as_dict() for name, answer in others.items()}


def _until(status: int, it: ObservedSidecar, shown: str) -> ObservedResponse:
    return next(answer for _ in range(50) if (answer := it.call(Authorization=f"Bearer {shown}")).status == status)


def _served_by_another(it: ObservedSidecar) -> ObservedResponse:
    shown = f"Bearer {token('falls')}"
    calls = (it.call(Authorization=shown) for _ in range(50))
    return next(answer for answer in calls if answer.headers["x-price-keeper-label"] == "economy")


def settings(it: ObservedSidecar) -> dict[str, dict[str, str]]:
    """Orgs and apps of every kind, and what is done with them; the secret of an app of the first."""
    whole = {"org_name": "Other", "timezone": noon_time_zone(), "quota_scope": "APP", "model_ordering": ["premium"]}
    many = {"premium": 10_000_000}
    _is(201, it.control("PUT", f"{ORGS}/{HARD}", whole | {"quotas": many, "enforcement": "hard"}))
    _is(201, it.control("PUT", f"{ORGS}/{LIMITED}", whole | {"quotas": many, "limits": {"rpm": 4, "tpm": 100_000}}))
    _is(201, it.control("PUT", f"{ORGS}/{HARD}/apps/poor", {"app_name": "Poor", "quotas": {"premium": 10}}))
    for name, more in (
        ("poor", {"model_ordering": ["premium"], "quotas": {"premium": 1}}),
        ("falls", {"quotas": {"premium": 1000, "economy": 10_000_000}}),
        ("shadow", {"enforcement": "shadow", "quotas": {"premium": 0, "economy": 10_000_000}}),
    ):
        _is(201, it.control("PUT", f"{ORGS}/{ORG}/apps/{name}", {"app_name": name} | more))
    app = f"{ORGS}/{ORG}/apps/{APP}"
    made = _is(201, it.control("PUT", app, {"app_name": APP}))
    secret = _is(200, it.control("GET", f"{app}/credentials/secret", X_Retrieval_Token=made["secret_retrieval_token"]))
    own = {"label": "own", "format": "nova", "prices_usd_per_1m": {"input": 0.5, "output": 2}}
    _is(201, it.control("POST", f"{app}/inference-profiles", own | {"inference_profile_arn": OWN}))
    chain = {"model_ordering": _CHAIN, "quotas": _QUOTAS}
    _is(200, it.control("PUT", app, {"app_name": APP} | chain))
    _is(200, it.control("PUT", f"{app}/override", {"label": "premium", "reason": "a test", "who": "ann"}))
    _is(201, it.control("POST", f"{app}/usage", _usage("a-request")))
    return secret


def sessions(it: ObservedSidecar, secret: dict[str, str]) -> None:
    """One that is refreshed, one whose token comes twice, one that is ended, and a token that is given back."""
    first, second, third = (_is(200, it.control("POST", "/auth/token", secret)) for _ in range(3))
    _is(200, it.control("POST", "/auth/refresh", {"refresh_token": first["refresh_token"]}))
    _is(401, it.control("POST", "/auth/refresh", {"refresh_token": first["refresh_token"]}))
    _is(200, it.control("DELETE", f"{ORGS}/{ORG}/apps/{APP}/sessions/{second['session_id']}"))
    _is(200, it.control("POST", "/auth/revoke", {"token": third["access_token"]}))


def control_api(document: dict[str, Any]) -> dict[str, Any]:
    """Of the document that describes it, which tests/property/test_control_document.py holds it to."""
    schemas = document["components"]["schemas"]
    return {
        f"{method.upper()} {path}": _operation(operation, schemas)
        for path, methods in sorted(document["paths"].items())
        for method, operation in sorted(methods.items())
    }


def _operation(operation: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"operation": operation["operationId"]}
    found["security"] = [name for each in operation["security"] for name in each]
    if operation["parameters"]:
        found["parameters"] = [f"{each['name']} in {each['in']}" for each in operation["parameters"]]
    if "requestBody" in operation:
        found["request"] = _content(operation["requestBody"]["content"], schemas)
    by_answer: dict[str, list[str]] = {}
    for status, each in sorted(operation["responses"].items()):
        by_answer.setdefault(json.dumps(_answer(each, schemas)), []).append(status)
    found["answers"] = {", ".join(statuses): json.loads(answer) for answer, statuses in by_answer.items()}
    return found


def _answer(response: dict[str, Any], schemas: dict[str, Any]) -> Any:
    content = response.get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    body: Any = "problem" if reference.endswith("/Problem") else _content(content, schemas)
    headers = sorted(response.get("headers", {}))
    return {"headers": ", ".join(headers), "body": body} if headers else body


def _content(content: dict[str, Any], schemas: dict[str, Any]) -> Any:
    return {kind: dict(sorted(_fields(each.get("schema", {}), schemas, "", ()))) for kind, each in content.items()}


def _fields(
    schema: dict[str, Any], schemas: dict[str, Any], path: str, above: tuple[str, ...]
) -> Iterator[tuple[str, Any]]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in above:
            return
        schema, above = schemas[name], (*above, name)
    for each in (*schema.get("oneOf", ()), *schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from _fields(each, schemas, path, above)
    required = set(schema.get("required", ()))
    for name, each in schema.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        yield place, _kind(each, schemas) + ("" if name in required else ", optional")
        yield from _fields(each, schemas, place, above)
    if isinstance(schema.get("additionalProperties"), dict):
        yield f"{path}.*", _kind(schema["additionalProperties"], schemas)
        yield from _fields(schema["additionalProperties"], schemas, f"{path}.*", above)
    if isinstance(schema.get("items"), dict):
        yield f"{path}[]", _kind(schema["items"], schemas)
        yield from _fields(schema["items"], schemas, f"{path}[]", above)


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _kind(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    kinds = schema.get("type", "any")
    kind = " | ".join(kinds) if isinstance(kinds, list) else str(kinds)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return f"{kind}: {', '.join(map(str, values))}" if values else kind


def _usage(request: str) -> dict[str, Any]:
    return {"request_id": request, "label": "premium", "input_tokens": 1000, "output_tokens": 200}


def _is(status: int, answer: ObservedResponse) -> Any:
    assert answer.status == status, (answer.status, answer.body)
    return json.loads(answer.body)


def shown_to(url: str) -> dict[str, str]:
    """What commands need to know of where they ask."""
    return {"PRICE_KEEPER_API_URL": url, "PRICE_KEEPER_API_KEY": ADMIN_KEY}
