"""`pdserve.Engine`: tasks share the batch, and abandoned requests are aborted."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_embedder import write_embedder
from builders.tiny_models import write_tiny
from systems.eventually import eventually
from systems.llm_kit import engine_threads, held, is_idle, num_requests, slow, stats

from pdserve import (
    LLM,
    Engine,
    EngineConfig,
    GenerationError,
    InvalidRequest,
    SamplingParams,
    StructuredOutputsParams,
)
from pdserve.llm import async_engine
from pdserve.llm.model import InProcessModel

pytestmark = pytest.mark.anyio
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=400)
HI = [{"role": "user", "content": "hi"}]


def config(folder: Path, max_waiting: int = 4) -> EngineConfig:
    return EngineConfig(
        model=str(folder), kv_tokens=2048, chunk_size=64, max_running=8, max_waiting=max_waiting
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[Engine]:
    async with Engine(config(folder)) as made:
        yield made


async def num_running(engine: Engine) -> int:
    return (await asyncio.to_thread(stats, engine)).running


async def test_tasks_share_the_batch_and_get_the_results_of_llm(
    engine: Engine, folder: Path
) -> None:
    prompts = [f"number {n}" for n in range(12)]  # more than may be queued at once
    found = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in prompts))
    chat = await engine.chat(HI, GREEDY)
    with LLM(config(folder)) as llm:
        assert [one.text for one in found] == [one.text for one in llm.generate(prompts, GREEDY)]
        assert chat == llm.chat(HI, GREEDY)
        assert engine.apply_chat_template(HI) == llm.apply_chat_template(HI) == chat.prompt
        assert engine.default_sampling_params() == llm.default_sampling_params()


async def test_streams_come_in_chunks(engine: Engine) -> None:
    whole = await engine.generate("hello", GREEDY)
    deltas = [delta async for delta in engine.generate_stream("hello", GREEDY)]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert len(deltas) > 3
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    answer = [delta.text async for delta in engine.chat_stream(HI, GREEDY)]
    assert "".join(answer) == (await engine.chat(HI, GREEDY)).text


async def test_the_loop_keeps_running_during_a_request(engine: Engine) -> None:
    with held(engine):
        task = asyncio.create_task(engine.generate("hello", GREEDY))
        await eventually(lambda: num_requests(engine))
        for _ in range(400):
            await asyncio.sleep(0)
        assert not task.done()
    assert len((await task).outputs[0].token_ids) == 12


async def test_a_closed_stream_aborts(engine: Engine) -> None:
    with slow(engine):
        async with aclosing(engine.generate_stream("x", LONG)) as stream:
            await anext(stream)
            assert await num_running(engine) == 1
    assert await num_running(engine) == 0
    assert await asyncio.to_thread(is_idle, engine)


async def test_a_cancelled_task_aborts(engine: Engine) -> None:
    with slow(engine):
        task = asyncio.create_task(engine.generate("x", LONG))
        await eventually(lambda: num_running(engine))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await num_running(engine) == 0
    assert await asyncio.to_thread(is_idle, engine)
    assert (await engine.generate("still there", GREEDY)).text


async def test_unread_streams_leave_room(engine: Engine) -> None:
    """As many as may be queued are started and abandoned; their requests end all the same."""
    streams = [engine.generate_stream(f"{n}", GREEDY) for n in range(4)]
    for stream in streams:
        await anext(stream)
    async with asyncio.timeout(30):
        assert (await engine.generate("more", GREEDY)).text
    for stream in streams:
        await stream.aclose()


async def test_invalid_arguments_are_named(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        await engine.generate([99999], GREEDY)
    with pytest.raises(TypeError, match="not int"):
        await engine.generate(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="Embeddings"):
        await engine.embed(["a", "b"])
    assert (await engine.generate("still there", GREEDY)).text
    assert await asyncio.to_thread(is_idle, engine)
    with pytest.raises(ValueError, match="block_size: 0 is below 1"):
        Engine(EngineConfig(block_size=0))
    with pytest.raises(RuntimeError, match="not started"):
        await Engine().generate("x")


async def test_more_grammars_than_may_wait_are_compiled_in_turn(engine: Engine) -> None:
    async def number(n: int) -> str:
        form = StructuredOutputsParams(regex=f"{n:03}")
        params = SamplingParams(max_tokens=9, structured_outputs=form)
        return (await engine.generate(f"prompt {n}", params)).text

    assert await asyncio.gather(*map(number, range(80))) == [f"{n:03}" for n in range(80)]
    assert await asyncio.to_thread(is_idle, engine)


@pytest.mark.parametrize(("max_waiting", "order"), [(4, [1, 2, 3]), (1, [3, 1, 2])])
async def test_waiting_requests_run_by_priority(
    folder: Path, max_waiting: int, order: list[int]
) -> None:
    """The order holds in the engine's queue, and before it where the first request has taken its
    only place.
    """
    ended = []

    async def run(priority: int) -> None:
        await engine.generate("x", GREEDY, priority=priority)
        ended.append(priority)

    async with Engine(replace(config(folder, max_waiting), max_running=1)) as engine:
        with slow(engine):
            stream = engine.generate_stream("x", LONG)
            await anext(stream)
            tasks = []
            for priority in (3, 2, 1):
                tasks.append(asyncio.create_task(run(priority)))
                num_submitted = 1 + len(tasks)
                await eventually(lambda n=num_submitted: num_requests(engine) == n)
                await asyncio.to_thread(stats, engine)
            await stream.aclose()
        await asyncio.gather(*tasks)
    assert ended == order


async def test_a_model_loaded_by_a_cancelled_start_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine_threads()
    begun, cancelled = threading.Event(), threading.Event()
    made = []

    def load(*args: Any) -> InProcessModel:
        begun.set()
        assert cancelled.wait(30)
        made.append(InProcessModel(*args))
        return made[0]

    monkeypatch.setattr(async_engine, "InProcessModel", load)
    starting = asyncio.create_task(Engine(config(folder)).start())
    await eventually(begun.is_set)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    cancelled.set()
    await eventually(lambda: made and engine_threads() == before)


async def test_close_ends_running_requests(folder: Path) -> None:
    before = engine_threads()
    engine = Engine(config(folder))
    await engine.start()
    stream = engine.generate_stream("x", LONG)
    with slow(engine):
        await anext(stream)
        await engine.close()
    await engine.close()
    with pytest.raises(GenerationError, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(RuntimeError, match="closed"):
        await engine.generate("x")
    assert engine_threads() == before


async def test_embeddings(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "m", "qwen3", normalizes=True)
    texts = [f"text {n}" for n in range(6)]
    async with Engine(config(path)) as engine:
        found = await engine.embed(texts)
        (alone,) = await engine.embed(texts[2])
    assert alone == pytest.approx(found[2], abs=1e-5)
    assert sum(value * value for value in alone) == pytest.approx(1)
