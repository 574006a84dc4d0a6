"""Workers of real processes that generate and embed: neither changes a bit of the other. In a mixed
fleet, embeddings go to the workers with --pool alone, also if one dies during the request."""

import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from builders.tiny_embedder import Oracle
from builders.tiny_models import write_tiny
from systems.eventually import LIMIT_S, wait_until
from systems.fleet import Fleet
from systems.replaceable import ReplaceableSystem
from systems.streams import Stream

pytestmark = pytest.mark.extended
NAME = "chat"
OPTIONS = ("--weights", "float32", "--kv-dtype", "float32", "--kernels", "native")
POOL = ("--kv-tokens", "16384", "--chunk-size", "128", *OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        tmp_path_factory.mktemp("models") / NAME, "qwen3", max_position_embeddings=2048
    )


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(256) for _ in range(rng.randint(1, length))] for _ in range(count)]


def embed(api: openai.OpenAI, inputs: list[list[int]]) -> list[list[float]]:
    response = api.embeddings.create(model=NAME, input=inputs)
    return [item.embedding for item in response.data]


def streaming(api: openai.OpenAI, max_tokens: int) -> tuple[list[Stream], list[threading.Thread]]:
    """Start four streams, each in a thread."""
    prompted: list[dict[str, Any]] = [
        {"prompt": f"{n}: once", "max_tokens": max_tokens, "temperature": 0.7, "seed": n}
        for n in range(4)
    ]
    streams = [Stream(options) for options in prompted]
    threads = [threading.Thread(target=stream.run, args=(api, NAME)) for stream in streams]
    for thread in threads:
        thread.start()
    return streams, threads


def answers(streams: list[Stream], threads: list[threading.Thread]) -> list[tuple[Any, ...]]:
    for thread in threads:
        thread.join(LIMIT_S)
    assert [stream.error for stream in streams if stream.error] == []
    return [stream.answer for stream in streams]


def test_embeddings_beside_streams(folder: Path) -> None:
    with Fleet("--model", str(folder), "--pool", "mean", "--decode", "1", *POOL) as fleet:
        api, inputs = client(fleet.url), prompts(20, 300)
        alone = [vector for ids in inputs for vector in embed(api, [ids])]
        oracle = Oracle(folder, "mean")
        for ids, vector in zip(inputs, alone, strict=True):
            assert torch.allclose(torch.tensor(vector), oracle.embedding(ids), atol=1e-4)
        quiet = answers(*streaming(api, 600))
        streams, threads = streaming(api, 600)
        wait_until(lambda: all(stream.num_chunks for stream in streams), "streams")
        assert embed(api, inputs) == alone
        assert any(thread.is_alive() for thread in threads), "the streams ended too early"
        assert answers(streams, threads) == quiet
        (model,) = api.models.list().data
        assert model.model_dump()["capabilities"]["embeddings"]
        assert model.model_dump()["capabilities"]["completion"]
        wait_until(fleet.all_blocks_back, "blocks back")


@pytest.fixture
def system(tmp_path: Path) -> Iterator[ReplaceableSystem]:
    with ReplaceableSystem(tmp_path, *POOL) as system:
        system.router()
        yield system


def test_a_mixed_fleet(folder: Path, system: ReplaceableSystem) -> None:
    words = ("--model", str(folder))
    system.worker("decode", *words)
    dying, last = (system.worker("decode", *words, "--pool", "last") for _ in range(2))
    system.gateway()
    api, inputs = client(system.gateways[0].url), prompts(200, 800)
    want = embed(api, inputs)
    oracle = Oracle(folder, "last")
    for ids, vector in zip(inputs[::10], want[::10], strict=True):
        assert torch.allclose(torch.tensor(vector), oracle.embedding(ids), atol=1e-4)
    quiet = answers(*streaming(api, 1000))
    before = computed(system, dying.address)
    salted = {"cache_salt": "other"}  # so that nothing is cached
    retries = system.view().retries

    def strike() -> None:
        wait_until(lambda: computed(system, dying.address) > before + 3000, "some prompts")
        dying.popen.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=strike)
    streams, threads = streaming(api, 1000)
    killer.start()
    response = api.embeddings.create(model=NAME, input=inputs, extra_body=salted)
    killer.join(LIMIT_S)
    assert system.view().retries > retries, "the killed worker had no work"
    assert [item.embedding for item in response.data] == want
    assert answers(streams, threads) == quiet
    system.workers.remove(dying)
    system.retire(last)

    def refusal() -> str:
        try:
            embed(api, inputs[:1])
        except openai.BadRequestError as error:
            return str(error)
        return ""

    wait_until(lambda: "--pool last or mean" in refusal(), "a refusal that names the option")
    assert answers(*streaming(api, 10)), "the worker without the option still generates"


def computed(system: ReplaceableSystem, address: str) -> int:
    """Return how many prompt tokens the worker has computed."""
    loads = [w.load for w in system.view().workers if w.hello.address == address]
    return sum(load.prompt_tokens for load in loads)
