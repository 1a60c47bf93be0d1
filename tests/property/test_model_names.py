"""Every form of a configured model's id means its label, and no id of another model ever does."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from price_keeper.budgets.label_selector import LabelResolver
from price_keeper.config.config_sections import LabelConfig, PricesConfig, names_mean_one_label
from price_keeper.config.label_names import LabelNames
from price_keeper.model_ids import PROFILE_PREFIXES

from tests.support.effort import tries

PRICES = PricesConfig(Decimal(1), Decimal(2))
REGIONS = ("us-east-1", "eu-west-1", "us-gov-west-1", "")

providers = st.sampled_from(["amazon", "anthropic", "ai21", "meta", "openai"])  # none is a prefix of a profile
words = st.from_regex(r"[a-z][a-z0-9]{0,6}(-[a-z0-9]{1,4}){0,2}(-v[0-9]:[0-9])?", fullmatch=True)
models = st.builds("{}.{}".format, providers, words)


def forms(model: str) -> list[str]:
    """Spelled out here by hand, and independent of how the product recognizes them."""
    profiles = [f"{prefix}.{model}" for prefix in ("us", "eu", "apac", "amer", "global", "jp", "au", "ca", "us-gov")]
    arns = [
        f"arn:{kind}:bedrock:{region}::foundation-model/{model}" for kind in ("aws", "aws-us-gov") for region in REGIONS
    ]
    arns += [
        f"arn:aws:bedrock:{region}:123456789012:inference-profile/{each}" for region in REGIONS for each in profiles
    ]
    return [model, *profiles, *arns]


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, LabelConfig]:
    """Labels with one or more models each, every one written in any of its forms, and no model of two labels."""
    found = draw(st.lists(models, min_size=1, max_size=8, unique=True))
    written = [draw(st.sampled_from(forms(model))) for model in found]
    count = draw(st.integers(1, len(written)))
    return {
        f"label-{number}": LabelConfig(own, "openai", PRICES, aliases=tuple(written[count + number :: count]))
        for number, own in enumerate(written[:count])
    }


def base(form: str) -> str:
    """The model that a form from `forms` was made of."""
    last = form.rpartition("/")[2]
    first, _, rest = last.partition(".")
    return rest if first in PROFILE_PREFIXES else last


@settings(max_examples=tries(100))
@given(configurations(), st.data())
def test_every_form_of_configured_model_means_its_label(labels: dict[str, LabelConfig], data: st.DataObject) -> None:
    assert list(names_mean_one_label(labels)) == []
    names, resolver = LabelNames(labels), LabelResolver(labels, allows_unlabelled=False)
    for name, label in labels.items():
        for written in label.model_names:
            form = data.draw(st.sampled_from(forms(base(written))))
            assert names.find(form) == name
            resolved = resolver.resolve(form)
            assert (resolved.requested, resolved.label, resolved.model) == (form, name, label.model)


@settings(max_examples=tries(100))
@given(configurations(), models, st.data())
def test_no_form_of_another_model_means_a_label(
    labels: dict[str, LabelConfig], other: str, data: st.DataObject
) -> None:
    assume(other not in {base(written) for label in labels.values() for written in label.model_names})
    assert LabelNames(labels).find(data.draw(st.sampled_from(forms(other)))) is None


@settings(max_examples=tries(200))
@given(configurations(), st.text("abu.s-g/:rn10", max_size=40))
def test_no_text_means_a_label_unless_it_is_a_form_of_its_model(labels: dict[str, LabelConfig], text: str) -> None:
    known = {form for label in labels.values() for written in label.model_names for form in forms(base(written))}
    assert (LabelNames(labels).find(text) is None) is (text not in {*labels, *known})


@settings(max_examples=tries(100))
@given(configurations(), st.data())
def test_form_of_a_model_of_two_labels_means_the_label_that_writes_it(
    labels: dict[str, LabelConfig], data: st.DataObject
) -> None:
    owner = data.draw(st.sampled_from(sorted(labels)))
    model = base(labels[owner].model)
    form = data.draw(st.sampled_from(forms(model)))
    is_alias = data.draw(st.booleans())
    added = LabelConfig("vendor.another" if is_alias else form, "openai", PRICES, aliases=(form,) if is_alias else ())
    both = {**labels, "second": added}
    complaints = list(names_mean_one_label(both))
    writers = {each: name for name, label in both.items() for each in label.model_names}
    if form in labels[owner].model_names:
        ((path, complaint),) = complaints
        assert path == ("labels", "second", *(("aliases", "0") if is_alias else ("model",)))
        assert f"labels.{owner}" in complaint
    else:
        assert complaints == []
        called = data.draw(st.sampled_from(forms(model)))
        assert LabelNames(both).find(called) == writers.get(called)
