"""Prompts of pairs for a model with a classification head, over a scripted router: those of the
tokenizers library, and that of Qwen3-Reranker for a tokenizer without a frame of pairs."""

from itertools import product
from typing import Any

import pytest
from builders.encoder_tokenizers import encoder_tokenizer
from fakes.pooled_answers import cross_encoder
from fakes.router import FakeRouter, tokenizer_json
from tokenizers import Tokenizer

from pdserve.gateway.rerank.pairs import AFTER, BEFORE, INSTRUCTION

pytestmark = pytest.mark.anyio
MODEL = {"model": "scorer"}
CONTEXT = 512
FRAMES = {"bert": 3, "xlm_roberta": 4, "modernbert": 3}  # ids around a pair


def library_of(arch: str) -> Any:
    library = encoder_tokenizer(arch)
    library.no_padding()
    library.no_truncation()
    library.encode_special_tokens = True
    return library


def qwen3() -> bytes:
    """A tokenizer with the tokens of Qwen3's, which puts nothing between two texts."""
    tokenizer = Tokenizer.from_buffer(tokenizer_json())
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer.to_str().encode()


def prompts_of(router: FakeRouter) -> list[list[int]]:
    prompts = sorted(list(start.prompt_ids) for start in router.starts)
    router.starts.clear()
    return prompts


async def scored(http: Any, **body: Any) -> list[float]:
    answer = await http.post("/score", json={**MODEL, **body})
    assert answer.status_code == 200, answer.text
    return [item["score"] for item in answer.json()["data"]]


async def test_prompts_are_those_of_the_tokenizers_library(make_http, subtests):
    """Cut short texts: the library also computes all combinations of the parts that it cuts off."""
    texts = ("what is it?", "a [SEP] b", "no. " * 10)
    pairs = list(product(texts, repeat=2))
    long = ("the thing, " * 100, "what is it? " * 80)
    for arch, frame in FRAMES.items():
        library = library_of(arch)
        router = cross_encoder(library.to_str().encode())
        http = make_http(router)
        with subtests.test(arch):
            want = [list(library.encode(*pair).ids) for pair in pairs]
            queries, documents = map(list, zip(*pairs, strict=True))
            scores = await scored(http, text_1=queries, text_2=documents)
            assert scores == pytest.approx([1 / len(ids) for ids in want])
            assert prompts_of(router) == sorted(want)
        for kept in (frame + 2, frame + 3, frame + 20, frame + 21):
            with subtests.test(arch, kept=kept):
                library.enable_truncation(kept, strategy="longest_first")
                want = [list(library.encode(*pair).ids) for pair in pairs]
                limit = {"truncate_prompt_tokens": kept}
                await scored(http, text_1=queries, text_2=documents, **limit)
                assert prompts_of(router) == sorted(want)
        with subtests.test(arch, kept=-1):
            library.enable_truncation(CONTEXT, strategy="longest_first")
            await scored(http, text_1=long[0], text_2=long[1], truncate_prompt_tokens=-1)
            assert prompts_of(router) == [list(library.encode(*long).ids)]


async def test_documents_are_ordered_by_score(make_http):
    http = make_http(cross_encoder(library_of("bert").to_str().encode()))
    documents = ["hello world", "w", "hello"]
    answer = await http.post("/rerank", json={**MODEL, "query": "what", "documents": documents})
    assert [result["index"] for result in answer.json()["results"]] == [1, 2, 0]


async def test_a_tokenizer_without_a_frame_gets_the_prompt_of_qwen3_reranker(make_http, subtests):
    library = Tokenizer.from_buffer(qwen3())
    router = cross_encoder(qwen3())
    http = make_http(router)

    def encoded(text: str) -> list[int]:
        return list(library.encode(text).ids)

    for instruction in (None, "Judge."):
        with subtests.test(instruction=instruction):
            text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: what\n<Document>: "
            want = [encoded(f"{BEFORE}{text}{document}{AFTER}") for document in ("a", "hello b")]
            body = {} if instruction is None else {"instruction": instruction}
            scores = await scored(http, text_1="what", text_2=["a", "hello b"], **body)
            assert scores == pytest.approx([1 / len(ids) for ids in want])
            assert prompts_of(router) == sorted(want)
    with subtests.test("cut"):
        await scored(http, text_1="what", text_2="hello " * 600, truncate_prompt_tokens=-1)
        ((*start, end),) = prompts_of(router)
        assert len(start) == CONTEXT - 1, "a head generates no token"
        assert end == encoded(AFTER)[-1]


async def test_refused(make_http, subtests):
    bert = library_of("bert")
    long = "no " * 600
    for name, library, change, param, says in (
        ("long document", bert, {"text_2": long}, "text_2", "context length is 512"),
        ("long query", bert, {"text_1": long}, "text_1", "context length is 512"),
        ("instruction", bert, {"instruction": "x"}, "instruction", "not support an instruction"),
        *(
            (f"kept {kept}", bert, {"truncate_prompt_tokens": kept}, "truncate_prompt_tokens",
             "must be -1, or from 5 to 512")
            for kept in (-2, 0, 1, 4, 513)
        ),
    ):  # fmt: skip
        with subtests.test(name):
            router = cross_encoder(library.to_str().encode())
            body = {**MODEL, "text_1": "what", "text_2": "a", **change}
            answer = await make_http(router).post("/score", json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert says in error["message"]
            assert not router.starts


async def test_a_head_serves_no_embeddings(make_http):
    http = make_http(cross_encoder(library_of("bert").to_str().encode()))
    answer = await http.post("/v1/embeddings", json={**MODEL, "input": "a"})
    assert answer.json()["error"]["message"] == "The model does not support Embeddings API"
