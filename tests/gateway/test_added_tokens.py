"""Structured answers of models whose tags are added tokens without the special flag."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from builders.packaged_tokenizers import PACKAGED, NotFetched
from builders.tool_answers import DS_BEGIN, DS_CALL, DS_CALL_END, DS_END, DS_SEPARATOR
from fakes.tool_model import TEMPLATE, THINKING
from fakes.walking_model import WalkingModel, with_added_tokens
from oracles.held_answers import BODY, URL, check, requests

pytestmark = pytest.mark.anyio
HERMES = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<h1>", "[x]")
DEEPSEEK = (DS_BEGIN, DS_END, DS_CALL, DS_CALL_END, DS_SEPARATOR, "<think>", "</think>")
MODELS = {
    "hermes": (HERMES, TEMPLATE),
    "hermes that thinks": (HERMES, THINKING),
    "deepseek": (DEEPSEEK, TEMPLATE.replace("<tool_call>", DS_BEGIN)),
}
SEEDS = range(3)
EVENTS = (
    "required calls", "named calls", "strict calls", "strict texts", "schema tags", "regex tags",
    "choice tags", "grammar tags",
)  # fmt: skip


async def test_answers_match_their_structure(
    make_http: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    seen: Counter[str] = Counter()
    for name, (added, template) in MODELS.items():
        model = WalkingModel(with_added_tokens(added), template, ["<|im_end|>"], added[:1])
        client = make_http(model)
        for form in requests(added[0]):
            with subtests.test(model=name, form=form):
                for seed in SEEDS:
                    found = await check(client, form, added[0], seed)
                    seen += Counter({f"{form} {what}": n for what, n in found.items()})
    assert {*EVENTS} <= set(seen)


@pytest.mark.extended
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", PACKAGED)
async def test_200_answers_of_a_real_tokenizer_match_their_structure(
    make_http: Callable[..., Any], name: str, subtests: pytest.Subtests
) -> None:
    try:
        packaged = PACKAGED[name]()
    except NotFetched as error:
        pytest.skip(str(error))
    model = WalkingModel(
        packaged.tokenizer, packaged.template, packaged.eos, [packaged.begin], packaged.thought
    )
    client = make_http(model)
    forms = requests(packaged.tag)
    if packaged.begin.startswith("{"):  # any JSON may begin with it
        refused = await client.post(URL, json={**BODY, **forms.pop("beside")})
        assert refused.status_code == 400
        assert "cannot be combined with tools" in refused.text
    seen: Counter[str] = Counter()
    for form in forms:
        with subtests.test(form=form):
            for seed in range(-(-200 // len(forms))):
                found = await check(client, form, packaged.tag, seed)
                seen += Counter({"answers": 1, **{f"{form} {key}": n for key, n in found.items()}})
    assert seen["answers"] >= 200
    assert {*EVENTS} <= set(seen)
