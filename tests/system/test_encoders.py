"""Encoders behind the HTTP API: vectors and scores equal transformers', and what an encoder cannot
do is an error in one sentence."""

from pathlib import Path

import httpx
import openai
import pytest
import torch
from builders.tiny_embedder import Oracle
from builders.tiny_encoder import write_encoder, write_scorer
from systems.fleet import Fleet
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.extended

OPTIONS = ("--decode", "1", "--prefill", "1")


def test_embeddings(subtests: pytest.Subtests, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "bert", "bert", "cls_token")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    oracle = Oracle(path, "cls")
    texts = ["The thing, is it?", "a", "a longer text. " * 15]
    with Fleet("--model", str(path), *OPTIONS) as fleet:
        client = openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
        with subtests.test("vectors"):
            tokenizer.no_truncation()
            response = client.embeddings.create(model="bert", input=texts)
            ids = [tokenizer.encode(text).ids for text in texts]
            assert response.usage.prompt_tokens == sum(map(len, ids))
            for item, text_ids in zip(response.data, ids, strict=True):
                got = torch.tensor(item.embedding)
                torch.testing.assert_close(got, oracle.embedding(text_ids), atol=1e-4, rtol=0)
            alone = client.embeddings.create(model="bert", input=texts[2])
            assert alone.data[0].embedding == response.data[2].embedding
        too_long = pytest.raises(openai.BadRequestError, match="maximum context length is 200")
        with subtests.test("a text beyond the positions"), too_long:
            client.embeddings.create(model="bert", input="a " * 300)
        no_text = pytest.raises(openai.BadRequestError, match="does not support Completions API")
        with subtests.test("no text"), no_text:
            client.completions.create(model="bert", prompt="a")
        with subtests.test("no hand-off"):
            assert fleet.prefills("remote") == 0
            assert fleet.prefills("local") >= len(texts)


def test_reranking(subtests: pytest.Subtests, tmp_path: Path) -> None:
    path = write_scorer(tmp_path / "scorer", "bert")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_padding()
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    query, documents = "what is it?", ["the thing.", "a", "no! a b c", "me and you"]
    want = []
    for document in documents:
        encoded = tokenizer.encode(query, document)
        inputs = {"input_ids": encoded.ids, "token_type_ids": encoded.type_ids}
        with torch.inference_mode():
            logits = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).logits
        want.append(float(torch.sigmoid(logits)))
    order = sorted(range(len(documents)), key=lambda n: -want[n])
    with Fleet("--model", str(path), "--decode", "1") as fleet:
        assert fleet.pids("prefill") == []
        body = {"model": "scorer", "query": query, "documents": documents}
        with subtests.test("order and scores"):
            answer = httpx.post(f"{fleet.url}/rerank", json=body, timeout=60).raise_for_status()
            results = answer.json()["results"]
            assert [result["index"] for result in results] == order
            scores = [result["relevance_score"] for result in results]
            assert scores == pytest.approx([want[n] for n in order], abs=1e-4)
        with subtests.test("a pair beyond the positions"):
            long = {**body, "documents": ["a " * 300]}
            refused = httpx.post(f"{fleet.url}/rerank", json=long, timeout=60)
            assert refused.status_code == 400
            assert "maximum context length is 200" in refused.json()["error"]["message"]
            cut = {**long, "truncate_prompt_tokens": -1}
            httpx.post(f"{fleet.url}/rerank", json=cut, timeout=60).raise_for_status()
        with subtests.test("no embeddings"):
            embed = {"model": "scorer", "input": "a"}
            refused = httpx.post(f"{fleet.url}/v1/embeddings", json=embed, timeout=60)
            assert refused.status_code == 400
            assert "does not support Embeddings API" in refused.json()["error"]["message"]
