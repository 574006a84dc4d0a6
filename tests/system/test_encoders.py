"""Encoders behind the HTTP API: vectors equal transformers', and what an encoder cannot do is an
error in one sentence."""

from pathlib import Path

import openai
import pytest
import torch
from builders.tiny_embedder import Oracle
from builders.tiny_encoder import write_encoder
from systems.fleet import Fleet
from tokenizers import Tokenizer

pytestmark = pytest.mark.extended

EXACT = ("--weights", "float32", "--kernels", "native", "--kv-dtype", "float32")
OPTIONS = ("--decode", "1", "--prefill", "1", *EXACT)


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
            found = client.embeddings.create(model="bert", input=texts)
            ids = [tokenizer.encode(text).ids for text in texts]
            assert found.usage.prompt_tokens == sum(map(len, ids))
            for item, text_ids in zip(found.data, ids, strict=True):
                got = torch.tensor(item.embedding)
                torch.testing.assert_close(got, oracle.embedding(text_ids), atol=1e-4, rtol=0)
            alone = client.embeddings.create(model="bert", input=texts[2])
            assert alone.data[0].embedding == found.data[2].embedding
        too_long = pytest.raises(openai.BadRequestError, match="maximum context length is 200")
        with subtests.test("a text beyond the positions"), too_long:
            client.embeddings.create(model="bert", input="a " * 300)
        no_text = pytest.raises(openai.BadRequestError, match="does not support Completions API")
        with subtests.test("no text"), no_text:
            client.completions.create(model="bert", prompt="a")
        with subtests.test("no hand-off"):
            assert fleet.prefills("remote") == 0
            assert fleet.prefills("local") >= len(texts)
