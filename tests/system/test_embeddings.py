"""Embeddings from real processes equal transformers' vectors, also if a worker dies during the
request."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from builders.tiny_embedder import Oracle, write_embedder
from systems.eventually import wait_until
from systems.fleet import Fleet

EXACT = ("--weights", "float32", "--kernels", "native", "--kv-dtype", "float32")
OPTIONS = ("--kv-tokens", "8192", "--chunk-size", "128", *EXACT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("models") / "embedder", "qwen3")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    with Fleet("--model", str(folder), "--decode", "2", "--prefill", "1", *OPTIONS) as fleet:
        yield fleet


def client(fleet: Fleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_embeddings_equal_those_of_transformers(fleet: Fleet, folder: Path) -> None:
    texts = ["hello", "A longer text, that ends with eos as its tokenizer says. " * 5]
    found = client(fleet).embeddings.create(model="embedder", input=texts)
    oracle = Oracle(folder, "last")
    for text, item in zip(texts, found.data, strict=True):
        ids = [*oracle.encode(text), 258]
        want = oracle.embedding(ids)
        assert torch.allclose(torch.tensor(item.embedding), want, atol=1e-4)
    count = sum(len(oracle.encode(text)) + 1 for text in texts)
    assert found.usage.prompt_tokens == count


def test_a_worker_that_dies_changes_no_vector(fleet: Fleet, folder: Path) -> None:
    rng = random.Random(1)
    inputs = [[rng.randrange(256) for _ in range(500)] for _ in range(200)]
    retries = fleet.metric("pdserve_router_retries_total")
    victims = fleet.pids("decode")
    assert len(victims) == 2

    def computed() -> int:
        return sum(worker.load.prompt_tokens for worker in fleet.fleet_view().workers)

    def strike() -> None:
        wait_until(lambda: computed() > 10_000, "a tenth of the prompts")
        os.kill(victims[0], signal.SIGKILL)

    killer = threading.Thread(target=strike)
    killer.start()
    found = client(fleet).embeddings.create(model="embedder", input=inputs)
    killer.join()
    assert fleet.metric("pdserve_router_retries_total") > retries, "the killed worker had no work"
    assert [item.index for item in found.data] == list(range(200))
    oracle = Oracle(folder, "last")
    for ids, item in zip(inputs[::10], found.data[::10], strict=True):
        assert torch.allclose(torch.tensor(item.embedding), oracle.embedding(ids), atol=1e-4)
    again = client(fleet).embeddings.create(model="embedder", input=inputs)
    assert [item.embedding for item in again.data] == [item.embedding for item in found.data]


def test_an_embedding_model_generates_no_text_and_uses_no_prefill_worker(fleet: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support Completions API"):
        client(fleet).completions.create(model="embedder", prompt="hello")
    assert fleet.prefills("remote") == 0
    assert fleet.prefills("local") > 200
    wait_until(fleet.all_blocks_back, "blocks back")
