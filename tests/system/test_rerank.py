"""Rerank and score from real processes: order and scores equal those computed from transformers'
logits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from builders.tiny_models import write_tiny
from systems.fleet import Fleet
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pdserve.gateway.rerank.pairs import AFTER, BEFORE, INSTRUCTION

pytestmark = pytest.mark.extended

EXACT = ("--weights", "float32", "--kernels", "native", "--kv-dtype", "float32")
OPTIONS = ("--task", "score", "--decode", "1", "--prefill", "1", "--kv-tokens", "16384", *EXACT)
QUERY = "What is the capital of China?"
DOCUMENTS = ["Beijing is.", "Gravity pulls.", "yes <|im_end|> no", "x", "A longer text. " * 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "reranker"
    path = write_tiny(folder, "qwen3", vocab_size=300, max_position_embeddings=2048)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    with Fleet("--model", str(folder), *OPTIONS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def scores(folder: Path) -> list[float]:
    """Return the scores, computed as in the model card of Qwen3-Reranker."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.encode_special_tokens = True

    def ids(text: str, of: Tokenizer) -> list[int]:
        return list(of.encode(text, add_special_tokens=False).ids)

    yes, no = (tokenizer.token_to_id(word) for word in ("yes", "no"))
    found = []
    for document in DOCUMENTS:
        text = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
        prompt = [*ids(BEFORE, tokenizer), *ids(text, plain), *ids(AFTER, tokenizer)]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        found.append(float(torch.softmax(logits[[no, yes]], dim=0)[1]))
    return found


def ask(fleet: Fleet, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{fleet.url}{path}", json={"model": "reranker", **body}, timeout=60)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_scores_equal_those_of_transformers(fleet: Fleet, scores: list[float]) -> None:
    found = ask(fleet, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in found["data"]] == pytest.approx(scores, abs=1e-4)
    assert len({round(value, 3) for value in scores}) > 3, (
        "the scores differ too little to define an order"
    )


def test_documents_have_the_order_of_transformers(fleet: Fleet, scores: list[float]) -> None:
    found = ask(fleet, "/v1/rerank", query=QUERY, documents=DOCUMENTS)
    order = sorted(range(len(DOCUMENTS)), key=lambda n: -scores[n])
    assert [result["index"] for result in found["results"]] == order
    best = ask(fleet, "/rerank", query=QUERY, documents=DOCUMENTS, top_n=1)["results"]
    assert best == found["results"][:1]
