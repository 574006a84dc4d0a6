"""Constraints on an answer depend on the beginning in its prompt and on the model's vocabulary."""

import hashlib
from typing import Any

import pytest
import tokenizers
from fakes.router import FakeRouter, saying, served, thinking_model
from fakes.scripted_service import scripted_service
from oracles.http_errors import CHAT, HI, check
from tokenizers import decoders, models, pre_tokenizers

from pdserve.engine.api import MAX_SEQUENCE_IDS
from pdserve.gateway.caller import Caller
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2
from pdserve.services.common.errors import ServiceError
from pdserve.text import RequestedSampling, Structure, TextCompletionRequest

pytestmark = pytest.mark.anyio
WORD = Structure("regex", "[a-z]+", "regex")


async def params_of(
    prompt: str, router: FakeRouter | None = None, **sampling: Any
) -> tuple[FakeRouter, pb.SamplingParams]:
    """The router and the sampling parameters that a worker would receive."""
    router = router or FakeRouter(saying("x"))
    service = scripted_service(router)
    request = TextCompletionRequest("tiny", [prompt], RequestedSampling(**sampling))
    async with service.prepare(request, Caller("r")) as completion:
        return router, completion.prompts[0].params


async def test_a_structure_may_bind_after_a_text() -> None:
    router, params = await params_of("a", structure=WORD, structure_after="</think>")
    assert list(params.grammar.begins_after) == router.encode("</think>")
    assert params.grammar.source
    _, params = await params_of("a", structure=WORD)
    assert list(params.grammar.begins_after) == []
    _, params = await params_of("a", structure_after="</think>")
    assert not params.HasField("grammar")


async def test_a_special_token_is_one_id() -> None:
    router, params = await params_of("a", structure=WORD, structure_after="<|im_end|>")
    assert list(params.grammar.begins_after) == [router.eos]


@pytest.mark.parametrize(
    ("prompt", "binds_at_once"),
    [
        ("a<think>\n\n</think>\n\n", True),
        ("a</think>", True),
        ("<think>b</think> and then", False),
        ("a<think>", False),
    ],
)
async def test_a_prompt_that_closes_the_thinking_binds_the_whole_answer(prompt, binds_at_once):
    _, params = await params_of(prompt, structure=WORD, structure_after="</think>")
    assert (list(params.grammar.begins_after) == []) == binds_at_once


@pytest.mark.parametrize(
    ("template", "begun"),
    [
        ("{{ messages[0].content }}{# </think> #}", False),
        ("</think>{{ messages[0].content }}<think>\n", True),
    ],
)
async def test_thinking_begins_with_the_template_and_not_with_client_text(
    make_http, template, begun
):
    card, blobs = served(template="{# </think> #}" + template)
    router = FakeRouter(saying("x"), [card], blobs)
    messages = [{"role": "user", "content": "what is <think> for?"}]
    body = {"model": "tiny", "messages": messages, "thinking_budget": 3}
    assert (await make_http(router).post(CHAT, json=body)).status_code == 200
    assert (list(router.starts[0].params.thinking.start_ids) == []) == begun


async def test_thinking_tags_are_sent() -> None:
    tags = ("<|im_start|>", "<|im_end|>")
    router, params = await params_of("a", thinking_budget=4, thinking_tags=tags)
    assert list(params.thinking.start_ids) == [router.words.token_to_id("<|im_start|>")]
    assert list(params.thinking.end_ids) == [router.eos]
    _, params = await params_of("a", thinking_budget=4, thinking_tags=("", "<|im_end|>"))
    assert list(params.thinking.start_ids) == []


async def test_a_model_that_cannot_write_a_tag_is_reported() -> None:
    """Use a vocabulary with only some letters."""
    vocab = {letter: number for number, letter in enumerate("?<think>/")}
    words = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    data = words.to_str().encode()
    card, blobs = served()
    card.tokenizer_digest = hashlib.sha256(data).hexdigest()
    card.vocab_size = len(vocab)
    del card.eos_ids[:]
    card.eos_ids.append(0)
    blobs[card.tokenizer_digest] = data
    router = FakeRouter(saying("x"), [card], blobs)
    budget = {"thinking_budget": 1, "thinking_budget_field": "reasoning_budget"}
    tags = ("<think>", "</think>")
    _, params = await params_of("think", router, **budget, thinking_tags=tags)
    assert len(params.thinking.end_ids) == len("</think>")
    for tags in (("<thank>", "</think>"), ("<think>", "</thank>"), ("<think>", "")):
        with pytest.raises(ServiceError) as caught:
            await params_of("think", router, **budget, thinking_tags=tags)
        assert (caught.value.code, caught.value.param) == (pb.INVALID_ARGUMENT, "reasoning_budget")
    with pytest.raises(ServiceError) as caught:
        await params_of("think", router, structure=WORD, structure_after="</thank>")
    assert (caught.value.code, caught.value.param) == (pb.INVALID_ARGUMENT, "regex")


async def test_each_prompt_has_its_constraints() -> None:
    card, blobs = served()
    router = FakeRouter(saying("x"), [card], blobs)
    service = scripted_service(router)
    sampling = RequestedSampling(
        thinking_budget=2, thinking_tags=("<think>", "</think>"), bad_words=("x",), structure=WORD
    )
    request = TextCompletionRequest("tiny", ["a", "a<think>"], sampling)
    async with service.prepare(request, Caller("r")) as completion:
        plain, begun = (prompt.params for prompt in completion.prompts)
    assert plain.grammar == begun.grammar
    assert plain.bad_words == begun.bad_words
    assert len(plain.thinking.start_ids)
    assert not len(begun.thinking.start_ids)


async def test_a_bad_word_of_many_tokens_is_refused() -> None:
    await params_of("a", bad_words=("x" * (MAX_SEQUENCE_IDS - 1),))
    with pytest.raises(ServiceError) as caught:
        await params_of("a", bad_words=("x" * MAX_SEQUENCE_IDS,))
    assert caught.value.param == "bad_words"


@pytest.mark.parametrize(
    ("param", "fields", "field"),
    [
        ("grammar", {"guided_regex": "a"}, "guided_regex"),
        ("grammar", {"response_format": {"type": "json_object"}}, "response_format"),
        ("thinking", {"reasoning_budget": 3}, "reasoning_budget"),
        ("bad_words", {"bad_words": ["a"]}, "bad_words"),
        ("max_tokens", {"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
async def test_a_refusal_of_a_worker_names_the_field_of_the_client(make_http, param, fields, field):
    async def play(router, start):
        failure = pb.Failure(code=pb.INVALID_ARGUMENT, message="no", param=param)
        failed = pb.Failed(request=start.request, epoch=start.epoch, failure=failure)
        yield router_pb2.RequestEvent(failed=failed)

    client = make_http(FakeRouter(play, *thinking_model()))
    reply = await client.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
    check(reply, 400, field)
