"""/v1/embeddings over a scripted router: forms of input, refusals, and limits on concurrency."""

import asyncio
import math
from base64 import b64decode
from struct import unpack
from typing import Any

import httpx2
import openai
import pytest
from builders.byte_tokenizer import write_tokenizer
from builders.encoder_tokenizers import encoder_tokenizer
from fakes.memory_tracer import MemoryTracer
from fakes.pooled_answers import HIDDEN, embedder, embedding_chat, vector_of
from fakes.router import FakeRouter, failed, placed, saying, served, with_tokenizer
from systems.eventually import eventually

from pdserve.gateway.openai import MAX_INPUTS
from pdserve.gateway.pooling import AT_ONCE
from pdserve.protos import common_pb2 as pb

pytestmark = pytest.mark.anyio
URL = "/v1/embeddings"


def unit(values: list[float]) -> list[float]:
    length = math.hypot(*values)
    return [value / length for value in values]


async def embed(http: Any, **body: Any) -> dict[str, Any]:
    answer = await http.post(URL, json={"model": "embedder", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_openai_client_requests_base64(make_app):
    router = embedder()
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(make_app(router)))
    client = openai.AsyncOpenAI(
        api_key="none", base_url="http://gateway/v1", http_client=http, max_retries=0
    )
    async with client:
        texts = ["hello", "hello world", "w"]
        found = await client.embeddings.create(model="embedder", input=texts)
        plain = await client.embeddings.create(
            model="embedder", input=texts, encoding_format="float", user="me"
        )
    assert [item.index for item in found.data] == [0, 1, 2]
    assert found.object == "list"
    assert found.model == "embedder"
    for text, item, other in zip(texts, found.data, plain.data, strict=True):
        assert item.embedding == other.embedding, "both must be the same float32 numbers"
        assert item.embedding == pytest.approx(unit(vector_of(router.encode(text))))
    count = sum(len(router.encode(text)) for text in texts)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (count, count)


async def test_the_operation_name_in_traces(make_http):
    tracer = MemoryTracer()
    http = make_http(embedder(), arrange=lambda service: setattr(service, "tracer", tracer))
    await embed(http, input="hello")
    assert tracer.spans()["request"].attributes["gen_ai.operation.name"] == "embeddings"


async def test_base64_is_little_endian_float32(make_http):
    http = make_http(embedder(normalizes=False))
    (item,) = (await embed(http, input=[3, 4, 5], encoding_format="base64"))["data"]
    assert unpack(f"<{HIDDEN}f", b64decode(item["embedding"])) == (3.0, 3.0, -5.0, 0.5)


INPUTS = [("hello", 1), (["hello", "w"], 2), ([5, 6, 7], 1), ([[5, 6, 7], [8]], 2)]


async def test_every_form_of_input(make_http, subtests):
    for given, num in INPUTS:
        with subtests.test(given=given):
            router = embedder()
            found = await embed(make_http(router), input=given)
            assert len(found["data"]) == len(router.starts) == num
            as_ids = [given] if isinstance(given, str) or isinstance(given[0], int) else given
            want = [router.encode(one) if isinstance(one, str) else one for one in as_ids]
            sent = sorted(list(start.prompt_ids) for start in router.starts)
            assert sent == sorted(want)
            assert all(start.pool and start.remaining_ms for start in router.starts)


async def test_every_input_has_the_priority_of_the_request(make_http):
    router = embedder()
    await embed(make_http(router), input=["hello", "w"], priority=-3)
    await embed(make_http(router), input="hello")
    assert [start.priority for start in router.starts] == [-3, -3, 0]


async def test_dimensions_cut_and_normalize_again(make_http):
    http = make_http(embedder())
    (item,) = (await embed(http, input=[3, 4, 5], dimensions=2))["data"]
    assert item["embedding"] == pytest.approx(unit([3.0, 3.0]))
    (whole,) = (await embed(http, input=[3, 4, 5], dimensions=HIDDEN))["data"]
    assert whole["embedding"] == pytest.approx(unit([3.0, 3.0, -5.0, 0.5]))


async def test_a_model_that_does_not_normalize(make_http):
    http = make_http(embedder(normalizes=False))
    (item,) = (await embed(http, input=[3, 4, 5], dimensions=3))["data"]
    assert item["embedding"] == [3.0, 3.0, -5.0]


async def test_truncation_keeps_the_end(make_http):
    router = embedder(context_len=8)
    http = make_http(router)
    await embed(http, input=[list(range(20))], truncate_prompt_tokens=3)
    await embed(http, input=[list(range(20))], truncate_prompt_tokens=-1)
    assert [list(s.prompt_ids) for s in router.starts] == [[17, 18, 19], list(range(12, 20))]


async def test_truncation_keeps_the_tokens_around_a_text(make_http):
    library = encoder_tokenizer("bert")
    router = embedder(context_len=200)
    with_tokenizer(router.cards[0], router.blobs, library.to_str().encode(), ())
    library.no_padding()
    library.no_truncation()
    http = make_http(router)
    first, *text, last = library.encode("what is it, " * 100).ids
    for kept, num_text in ((3, 1), (10, 8), (-1, 198)):
        await embed(http, input="what is it, " * 100, truncate_prompt_tokens=kept)
        assert list(router.starts[-1].prompt_ids) == [first, *text[-num_text:], last]
    body = {"model": "embedder", "input": "what", "truncate_prompt_tokens": 2}
    answer = await http.post(URL, json=body)
    assert answer.status_code == 400
    assert "-1, or from 3 to 200" in answer.json()["error"]["message"]


async def test_the_context_may_be_all_prompt(make_http):
    http = make_http(embedder(context_len=8))
    assert await embed(http, input=[list(range(8))])
    answer = await http.post(URL, json={"model": "embedder", "input": [list(range(9))]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


REFUSED = [
    ({"input": None}, "input", "must be a string, a list"),
    ({"input": []}, "input", "must be a string, a list"),
    ({"input": [[]]}, "input", "must be a string, a list"),
    ({"input": ["a", 5]}, "input", "must be a string, a list"),
    ({"input": [True, False]}, "input", "must be a string, a list"),
    ({"input": {"text": "a"}}, "input", "must be a string, a list"),
    ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS} inputs"),
    ({"input": ""}, "input", "input 0 has no tokens"),
    ({"input": ["a", ""]}, "input", "input 1 has no tokens"),
    ({"input": [5, 100_000]}, "input", "100000"),
    ({"encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
    ({"dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"dimensions": HIDDEN + 1}, "dimensions", f"from 1 to {HIDDEN}"),
    ({"dimensions": "2"}, "dimensions", "valid integer"),
    ({"normalize": False}, "normalize", "should be True"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or from 1 to 512"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages", "not a field"),
    ({"prompt": "a"}, "prompt", "not a field"),
]


async def test_invalid_requests_are_refused(make_http, subtests):
    router = embedder()
    client = make_http(router)
    for body, param, says in REFUSED:
        with subtests.test(body=body):
            router.starts.clear()
            answer = await client.post(URL, json={"model": "embedder", "input": "a", **body})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["param"] or "") == param
            assert says in error["message"]
            assert not router.starts


async def test_an_unknown_model(make_http):
    answer = await make_http(embedder()).post(URL, json={"model": "other", "input": "a"})
    assert answer.status_code == 404


async def test_each_model_serves_only_its_task(make_http):
    generating = make_http(saying("hello"))
    answer = await generating.post(URL, json={"model": "tiny", "input": "a"})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("The model does not support Embeddings API; ")
    assert "--pool last or mean" in message
    assert answer.json()["error"]["param"] == "model"
    http = make_http(embedder())
    chat = {"model": "embedder", "messages": [{"role": "user", "content": "hi"}]}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The model does not support Chat Completions API"
    answer = await http.post("/v1/completions", json={"model": "embedder", "prompt": "hi"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The model does not support Completions API"


async def test_a_model_with_pool_serves_both_tasks(make_http):
    router = embedding_chat("mean")
    http = make_http(router)
    answer = await http.post(URL, json={"model": "tiny", "input": "hello world"})
    (start,) = router.starts
    assert (start.pool, start.pooling) == (True, "mean")
    (item,) = answer.json()["data"]
    assert item["embedding"] == pytest.approx(unit(vector_of(router.encode("hello world"))))
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = await http.post("/v1/chat/completions", json=chat)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert not router.starts[-1].pooling
    context_len = router.cards[0].context_len
    answer = await http.post(URL, json={"model": "tiny", "input": [5] * context_len})
    assert answer.status_code == 200, "an embedding leaves no room for an answer"
    answer = await http.post(URL, json={"model": "tiny", "input": [5] * (context_len + 1)})
    assert "0 in the completion" in answer.json()["error"]["message"]
    pair = {"model": "tiny", "text_1": "hello", "text_2": "hello"}
    answer = await http.post("/score", json=pair)
    assert answer.json()["data"][0]["score"] == pytest.approx(1.0)


class Slow:
    """Answers when released, the latest request first."""

    def __init__(self) -> None:
        self.router = embedder()
        self._answer = self.router.play
        self.router.play = self.play
        self.open = self.most = 0
        self.go = asyncio.Event()

    async def play(self, router: FakeRouter, start: pb.Start):
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.go.wait()
            for _ in range(5 * AT_ONCE - self.open):
                await asyncio.sleep(0)
            async for event in self._answer(router, start):
                yield event
        finally:
            self.open -= 1


async def test_concurrent_inputs_are_bounded_and_answers_are_in_order(make_http):
    slow = Slow()
    inputs = [[n % 256, 1] for n in range(3 * AT_ONCE)]
    asking = asyncio.create_task(embed(make_http(slow.router), input=inputs, dimensions=1))
    await eventually(lambda: slow.open == AT_ONCE)
    slow.go.set()
    found = await asking
    assert slow.most == AT_ONCE
    assert len(slow.router.starts) == len(inputs)
    assert [item["index"] for item in found["data"]] == list(range(len(inputs)))
    signs = [item["embedding"] for item in found["data"]]
    assert signs == [[1.0] if ids[0] else [0.0] for ids in inputs]


async def test_a_disconnect_cancels_all_inputs(make_service):
    from pdserve.gateway.caller import Caller
    from pdserve.gateway.openai import EmbeddingBody, EmbeddingReply

    slow = Slow()
    service = make_service(slow.router)
    body = EmbeddingBody(model="embedder", input=[[n, 1] for n in range(2 * AT_ONCE)])
    asking = asyncio.create_task(EmbeddingReply(service, body, Caller("r")).whole())
    await eventually(lambda: slow.open == AT_ONCE)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(slow.router.left) == AT_ONCE
    assert slow.open == 0
    assert service.limits.open == 0


async def test_a_failed_input_fails_the_request(make_http):
    router = embedder()
    answer_of = router.play

    async def play(router: FakeRouter, start: pb.Start):
        if start.prompt_ids[0] == 1:
            yield placed(start)
            yield failed(start, pb.UNAVAILABLE, "no worker")
            return
        if start.prompt_ids[0] == 2:
            await asyncio.Event().wait()
        async for event in answer_of(router, start):
            yield event

    router.play = play
    body = {"model": "embedder", "input": [[0], [2], [1]]}
    answer = await make_http(router).post(URL, json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no worker"
    assert router.left == [start.request for start in router.starts if start.prompt_ids[0] == 2]


async def test_an_answer_without_a_vector_is_an_error(make_http):
    router = embedder()
    router.play = saying("hello")
    answer = await make_http(router).post(URL, json={"model": "embedder", "input": "a"})
    assert answer.status_code == 500


async def test_the_text_ends_as_the_tokenizer_defines(make_http, tmp_path):
    from builders.tiny_embedder import EOS, processors
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, 258)]
    )
    card, blobs = served("embedder")
    card.pooling, card.hidden_size = "last", HIDDEN
    blobs[card.tokenizer_digest] = tokenizer.to_str().encode()
    router = FakeRouter(embedder().play, [card], blobs)
    http = make_http(router)
    await embed(http, input="ab")
    await embed(http, input="ab", add_special_tokens=False)
    plain = tokenizer.encode("ab", add_special_tokens=False).ids
    assert [list(s.prompt_ids) for s in router.starts] == [[*plain, 258], plain]


async def test_a_request_counts_once_with_its_prompt_tokens(make_http):
    http = make_http(embedder())
    await embed(http, input=[[1, 2, 3], [4]])
    page = (await http.get("/metrics")).text
    assert 'vllm:prompt_tokens_total{model_name="embedder"} 4.0' in page
    success = 'vllm:request_success_total{finished_reason="stop",model_name="embedder"} 1.0'
    assert success in page


async def test_an_answer_with_too_many_numbers_is_refused(make_http, monkeypatch):
    """Bound the answer by size: a float takes about 20 characters, or five in base64."""
    monkeypatch.setattr("pdserve.gateway.openai.embeddings.MAX_ANSWER_BYTES", 22 * 3 * HIDDEN)
    router = embedder()
    http = make_http(router)
    await embed(http, input=["a"] * 3)
    answer = await http.post(URL, json={"model": "embedder", "input": ["a"] * 4})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert "4 vectors of 4 numbers" in error["message"]
    assert "base64, fewer dimensions or fewer inputs" in error["message"]
    assert len(router.starts) == 3
    await embed(http, input=["a"] * 6, dimensions=2)
    await embed(http, input=["a"] * 12, encoding_format="base64")
    answer = await http.post(
        URL, json={"model": "embedder", "input": ["a"] * 13, "encoding_format": "base64"}
    )
    assert answer.status_code == 400
    assert "base64" not in answer.json()["error"]["message"]
