"""Paths taken apart and put together, and the tricks that must not get through."""

from __future__ import annotations

import string
from urllib.parse import quote, unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from price_keeper.operations import MAX_ID_CHARS, Operation, OperationPath, decode_model_id, encode_model_id, parse_path

ARN = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.anthropic.claude-sonnet-4-5-v1:0"
CUSTOM = "arn:aws:bedrock:us-east-1:123456789012:custom-model/amazon.titan-text/abcdef123456"
FOUNDATION = "arn:aws:bedrock:us-east-1::foundation-model/anthropic.claude-v2:1"
GUARDRAIL = "arn:aws-us-gov:bedrock:us-gov-west-1:123456789012:guardrail/abc123"
JOB = "arn:aws:bedrock:us-east-1:123456789012:async-invoke/abcdef123456"

OF_A_MODEL = {
    "invoke": Operation.INVOKE,
    "invoke-with-response-stream": Operation.INVOKE_STREAM,
    "invoke-with-bidirectional-stream": Operation.INVOKE_BIDIRECTIONAL,
    "converse": Operation.CONVERSE,
    "converse-stream": Operation.CONVERSE_STREAM,
    "count-tokens": Operation.COUNT_TOKENS,
}


def lower_hex(text: str) -> str:
    return text.replace("%3A", "%3a").replace("%2F", "%2f")


def percent_encoded(text: str) -> str:
    """Every single character encoded, which is allowed although no client does it."""
    return "".join(f"%{ord(character):02X}" for character in text)


def twice(text: str) -> str:
    return quote(quote(text, safe=""), safe="")


def raw(text: str) -> str:
    return text


def once(text: str) -> str:
    return quote(text, safe="")


SPELLINGS = [raw, once, twice, lambda text: lower_hex(once(text)), percent_encoded, lambda t: once(percent_encoded(t))]


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("last", OF_A_MODEL)
@pytest.mark.parametrize("model", ["premium", "anthropic.claude-v2:1", "my_model", "a", ARN, CUSTOM, FOUNDATION])
@pytest.mark.parametrize("spell", SPELLINGS)
def test_model_path_is_parsed_however_encoded(last, model, spell):
    target = parse_path(f"/model/{spell(model)}/{last}")
    assert target == OperationPath(OF_A_MODEL[last], model)
    assert target.path == f"/model/{once(model)}/{last}"


@pytest.mark.parametrize("spell", SPELLINGS)
@pytest.mark.parametrize("version", ["DRAFT", "1", "12345678"])
@pytest.mark.parametrize("guardrail", ["abc123", GUARDRAIL])
def test_apply_guardrail_path_is_parsed(spell, version, guardrail):
    target = parse_path(f"/guardrail/{spell(guardrail)}/version/{version}/apply")
    assert target == OperationPath(Operation.APPLY_GUARDRAIL, guardrail, version)
    assert target.path == f"/guardrail/{once(guardrail)}/version/{version}/apply"


@pytest.mark.parametrize("spell", SPELLINGS)
def test_async_invoke_path_is_parsed(spell):
    target = parse_path(f"/async-invoke/{spell(JOB)}")
    assert target == OperationPath(Operation.ASYNC_INVOKE, JOB)
    assert target.path == f"/async-invoke/{once(JOB)}"


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/async-invoke", Operation.ASYNC_INVOKES),
        ("/guardrail-checks/invoke", Operation.CHECK_GUARDRAILS),
        ("/openai/v1/chat/completions", Operation.CHAT_COMPLETIONS),
    ],
)
def test_path_without_id_is_parsed(path, operation):
    assert parse_path(path) == OperationPath(operation)
    assert parse_path(path).path == path


def test_path_is_rebuilt_with_other_model():
    target = parse_path("/model/premium/converse")
    assert target._replace(id=ARN).path == f"/model/{once(ARN)}/converse"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "model/x/invoke",
        "/model",
        "/model/",
        "/model/x",
        "/model/invoke",
        "/model/x%2Finvoke",
        "/model/x/",
        "/model/x/invoke/",
        "/model/x/invoke?a=b",
        "/model/x/invoke;a=b",
        "/model/x/invoke%00",
        "/model/x/INVOKE",
        "/model/x/%69nvoke",
        "/model/x/invoke-model",
        "/MODEL/x/invoke",
        "/%6Dodel/x/invoke",
        "//model/x/invoke",
        "/./model/x/invoke",
        "/../model/x/invoke",
        "/x/../model/x/invoke",
        "http://elsewhere/model/x/invoke",
        "/guardrail/apply",
        "/guardrail/x/apply",
        "/guardrail/x/version/apply",
        "/guardrail/x/version/1/apply/",
        "/guardrail/x/version/1",
        "/guardrail/x/version%2F1/apply",
        "/async-invoke?maxResults=1",
        "/async-invokes",
        "/guardrail-checks/invoke/",
        "/openai/v1/chat/completions/",
        "/openai/v1//chat/completions",
        "/openai/v1/models",
        "/inference-profiles",
        "*",
    ],
)
def test_unknown_path_is_none(path):
    assert parse_path(path) is None


# ---------------------------------------------------------------- ids that go no further

TRICKS = [
    "",
    ".",
    "..",
    "%2e",
    "%2e%2e",
    "%2E%2E",
    ".%2e",
    "..%2f",
    "..%2fx",
    "..%5cx",
    "%252e",
    "%252e%252e",
    "%252e%252e%252f",
    "x..y",
    "x/..",
    "../x",
    "a/b",
    "a%2Fb",
    "a%252Fb",
    "/x",
    "x/",
    "//",
    "%2F",
    "arn:/x",
    "arn:aws:x/",
    "arn:aws:x//y",
    "arn:aws:x/./y",
    "arn:aws:x/.",
    "arn:aws:x/../y",
    "arn:aws:x/%2e%2e/y",
    "arn:aws:x%2F%2Fy",
    "arn%3Aaws%3Ax%2F..%2Fy",
    "ARN:aws:x/y",
    "x;y",
    "x;v=1",
    "x%3Bv=1",
    "x?y",
    "x%3Fy",
    "x%253Fy",
    "x#y",
    "x%23y",
    "x\\y",
    "x%5Cy",
    "x%00",
    "x%2500",
    "x\x00",
    "x%0d%0ay",
    "x\r\ny",
    "x\n",
    "\nx",
    "a\n..",
    "x%0A",
    "x%7F",
    "x y",
    "x%20y",
    "x+y",
    "x@y",
    "%c0%ae%c0%ae",
    "%c0%af",
    "%e0%80%af",
    "%C0%AEx",
    "%ff",
    "é",
    "%C3%A9",
    "．．",
    "%EF%BC%8E%EF%BC%8E",
    "%",
    "x%",
    "x%3",
    "%zz",
    "x%3A%",
    "%%33A",
    "%2%35",
    "x%u003A",
    "x%25253A0",
    "{id}",
    "x" * (MAX_ID_CHARS + 1),
    "%78" * (MAX_ID_CHARS + 1),
    "arn:aws:" + "x" * MAX_ID_CHARS,
]


@pytest.mark.parametrize("trick", TRICKS)
def test_malicious_id_is_refused_with_allowed_characters(trick):
    for path in (f"/model/{trick}/invoke", f"/async-invoke/{trick}", f"/guardrail/{trick}/version/1/apply"):
        with pytest.raises(ValueError, match=r"letters, digits, .* an ARN .* single slashes"):
            parse_path(path)
    with pytest.raises(ValueError, match="letters, digits") as refused:
        encode_model_id(trick)
    assert len(str(refused.value)) < 1000
    assert str(refused.value).isascii()
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("version", ["", "0", "01", "draft", "DRAFT2", "123456789", "1/2", "..", "%31", "1\n", "-1"])
def test_malformed_guardrail_version_is_refused(version):
    with pytest.raises(ValueError, match="DRAFT or a number"):
        parse_path(f"/guardrail/abc/version/{version}/apply")


def test_longest_id_is_accepted():
    longest = "x" * MAX_ID_CHARS
    assert decode_model_id(longest) == decode_model_id(percent_encoded(longest)) == longest
    assert parse_path(f"/model/{twice(longest)}/converse").path == f"/model/{longest}/converse"


# ---------------------------------------------------------------- any id

PLAIN = string.ascii_letters + string.digits + "._-:"


def is_fit(text: str) -> bool:
    return ".." not in text and not {"", "."} & set(text.split("/"))


parts = st.text(PLAIN, min_size=1, max_size=20)
arns = st.lists(parts, min_size=1, max_size=4).map(lambda several: "arn:" + "/".join(several))
ids = st.one_of(parts, arns, st.sampled_from(["premium", ARN, CUSTOM, FOUNDATION])).filter(is_fit)
near_ids = st.text(PLAIN + "/%;?#\\ \x00é", max_size=12)
layered = st.lists(st.sampled_from(["%", "25", "2e", "2F", "3a", "..", ".", "/", "a", "arn:", ":"]), max_size=10)


@given(ids, st.sampled_from(SPELLINGS))
def test_decoding_reverses_encoding(model, spell):
    assert decode_model_id(spell(model)) == model
    assert decode_model_id(encode_model_id(model)) == model
    assert unquote(encode_model_id(model)) == model


@given(ids, ids, st.sampled_from(list(OF_A_MODEL.values())))
@example("arn:a/b", "arn:a:b", Operation.INVOKE)
def test_two_ids_never_share_a_path(one, other, operation):
    assert (OperationPath(operation, one).path == OperationPath(operation, other).path) == (one == other)


@given(ids, st.sampled_from(Operation))
def test_built_path_parses_to_same_target(some_id, operation):
    target = OperationPath(
        operation,
        some_id if "{id}" in operation.value else "",
        "7" if "{version}" in operation.value else "",
    )
    assert parse_path(target.path) == target


@given(st.one_of(near_ids, layered.map("".join), st.text(max_size=12)))
def test_accepted_path_is_safe_to_send(text):
    for path in (text, f"/model/{text}/invoke", f"/async-invoke/{text}", f"/guardrail/{text}/version/1/apply"):
        try:
            target = parse_path(path)
        except ValueError:
            continue
        if target is not None:
            assert is_fit(target.id) or not target.id
            assert set(target.id) <= set(PLAIN + "/")
            assert set(target.path) <= set(string.ascii_letters + string.digits + "._-%/")
            assert parse_path(target.path) == target
