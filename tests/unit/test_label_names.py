"""Names of a label's model, and aliases: which are valid, the line of an invalid one, and the label that they mean."""

from __future__ import annotations

import pytest
from price_keeper.config.config_sections import parse_config
from price_keeper.config.label_names import LabelNames
from price_keeper.model_ids import find_base_model, find_profile_region

from tests.support.configs import label, problems

NOT_A_NAME = "expected a name that an app may call by: an ARN, or letters, digits and any of ._:-"
PROFILE = "arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/abc123"


def two_labels(first: str, second: str) -> str:
    """Each with a model and aliases in one line: 2 is the first, 3 the second."""
    rest = "format: llama, prices_usd_per_1m: {input: 1, output: 1}"
    return f"labels:\n  one: {{{first}, {rest}}}\n  two: {{{second}, {rest}}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (label("    aliases: [x, '']"), f"6: labels.one.aliases.1: {NOT_A_NAME}"),
        (label("    aliases:\n    - x\n    - a b"), f"8: labels.one.aliases.1: {NOT_A_NAME}"),
        (label("    aliases: [' x']"), f"6: labels.one.aliases.0: {NOT_A_NAME}"),
        (label("    aliases: [a/b]"), f"6: labels.one.aliases.0: {NOT_A_NAME}"),
        (label("    aliases: [a%3Ab]"), f"6: labels.one.aliases.0: {NOT_A_NAME}"),
        (label("    aliases: [x, y, x]"), "6: labels.one.aliases.2: the same as aliases.0"),
        (label("    aliases: [m]"), "6: labels.one.aliases.0: the label's own model"),
        (label("    aliases: x"), "6: labels.one.aliases: expected a list, found text"),
        (label("    aliases: [1]"), "6: labels.one.aliases.0: expected text (put it in quotes), found 1"),
        (two_labels("model: m", "model: n, aliases: [m]"), "3: labels.two.aliases.0: the same model as labels.one"),
        (two_labels("model: m, aliases: [n]", "model: n"), "3: labels.two.model: also an alias of labels.one"),
        (
            two_labels("model: m, aliases: [x]", "model: n, aliases: [y, x]"),
            "3: labels.two.aliases.1: also an alias of labels.one",
        ),
        (
            two_labels("model: m", "model: n, aliases: [one]"),
            "3: labels.two.aliases.0: also the name of another label: one",
        ),
        (two_labels("model: us.a.m", "model: us.a.m"), "3: labels.two.model: the same model as labels.one"),
    ],
)
def test_name_that_is_invalid_or_ambiguous_is_reported_with_line(text: str, problem: str) -> None:
    assert problems(text) == [f"config.yaml:{problem}"]


@pytest.mark.parametrize(
    "aliases",
    ["[]", "[us.a.m, a.m]", "[Any-Name_2.0]", "[one]", f"['{PROFILE}']", "[arn:aws:bedrock:us-east-1::prompt/X]"],
)
def test_name_that_means_one_label_is_accepted(aliases: str) -> None:
    assert len(parse_config(two_labels(f"model: eu.a.m, aliases: {aliases}", "model: eu.a.n"), "", {}).labels) == 2


def test_profiles_of_one_model_stand_for_their_own_labels_alone() -> None:
    names = LabelNames(parse_config(two_labels("model: us.a.m, aliases: [a.m]", "model: eu.a.m"), "", {}).labels)
    assert [names.find(each) for each in ("us.a.m", "a.m", "eu.a.m")] == ["one", "one", "two"]
    for name in ("apac.a.m", "arn:aws:bedrock:us-east-1::foundation-model/a.m"):
        assert names.find(name) is None


def test_label_name_goes_before_form_of_another_labels_model() -> None:
    text = two_labels("model: us.a.m", "model: n").replace("  two:", "  a.m:")
    names = LabelNames(parse_config(text, "", {}).labels)
    assert [names.find(each) for each in ("us.a.m", "eu.a.m", "a.m")] == ["one", "one", "a.m"]


def test_alias_stands_for_label_in_every_form() -> None:
    text = two_labels(f"model: m, aliases: [us.a.x-v1:0, gpt-4o, '{PROFILE}']", "model: a.y")
    names = LabelNames(parse_config(text, "", {}).labels)
    for name in ("one", "m", "gpt-4o", "a.x-v1:0", "apac.a.x-v1:0", PROFILE):
        assert names.find(name) == "one"
    for name in ("two", "a.y", "us-gov.a.y", "arn:aws-us-gov:bedrock:us-gov-west-1::foundation-model/a.y"):
        assert names.find(name) == "two"
    for name in ("", "us.m", "us.gpt-4o", "GPT-4o", "a.x-v1:1", "us.us.a.y", "xy.a.y", PROFILE + "4", "us.one"):
        assert names.find(name) is None


def test_label_name_goes_before_form_of_a_model() -> None:
    names = LabelNames(
        parse_config(label().replace("  one:", "  us.a.m:").replace("model: m", "model: a.m"), "", {}).labels
    )
    assert names.find("us.a.m") == names.find("a.m") == "us.a.m"


@pytest.mark.parametrize(
    ("arn", "region"),
    [
        (PROFILE, "us-east-1"),
        (PROFILE.replace("aws:", "aws-us-gov:").replace("us-east-1", "us-gov-west-1"), "us-gov-west-1"),
        (PROFILE.replace("application-", ""), None),
        (PROFILE.replace("us-east-1", "evil.example"), None),
        (PROFILE.replace("us-east-1", "us-east-1.evil.example"), None),
        (PROFILE.replace("us-east-1", ""), None),
        (PROFILE + "/x", None),
        ("application-inference-profile/abc123", None),
        ("premium", None),
    ],
)
def test_only_arn_of_application_profile_has_its_region(arn: str, region: str | None) -> None:
    assert find_profile_region(arn) == region


def test_flood_of_unknown_ids_keeps_cache_bounded() -> None:
    for number in range(5000):
        find_base_model(f"us.flood.model-{number}")
    found = find_base_model.cache_info()
    assert found.currsize == found.maxsize == 1024
