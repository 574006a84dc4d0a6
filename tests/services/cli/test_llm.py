"""The in-process LLM on a tiny model: batches, stop strings, streams, and a clean end."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grammar_kit import of_regex
from tiny_embedder import Oracle, write_embedder
from tiny_models import write_tiny

import pdserve
from pdserve.engine.api.errors import ContextLengthExceeded, InvalidRequest
from pdserve.engine.api.request import SamplingParams
from pdserve.gateway.text.errors import TextError
from pdserve.services.llm.generation import GenerationError
from pdserve.services.llm.llm import LLM
from pdserve.services.options.options import OptionError

OPTIONS: dict[str, Any] = {"kv_tokens": 2048, "chunk_size": 64, "max_running": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_waiting=4, **OPTIONS) as made:
        yield made


@pytest.mark.parametrize("normalizes", [True, False])
def test_embeddings_are_those_of_transformers(tmp_path: Path, normalizes: bool) -> None:
    path = write_embedder(tmp_path / "m", "qwen3", normalizes=normalizes)
    oracle = Oracle(path, "last")
    exact: dict[str, Any] = {"weights": "float32", "kernels": "reference"}
    with LLM(str(path), max_waiting=4, **OPTIONS, **exact) as llm:
        texts = [f"number {n}, " + "x" * n for n in range(10)]  # more than may wait at once
        found = llm.embed(texts)
        for text, vector in zip(texts, found, strict=True):
            ids = [*oracle.encode(text), 258]
            want = oracle.embedding(ids) if normalizes else oracle.pooled(ids)
            assert vector == pytest.approx(want.tolist(), abs=1e-4)
        (by_ids,) = llm.embed([*oracle.encode(texts[1]), 258])
        assert by_ids == pytest.approx(found[1], abs=1e-5)
        with pytest.raises(ContextLengthExceeded):
            llm.embed(["a", "x" * 600])
        with pytest.raises(InvalidRequest, match="does not support text generation"):
            llm.generate("hello")
        assert len(llm.embed("still here")) == 1


def test_a_generating_model_embeds_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="The model does not support Embeddings API"):
        llm.embed("hello")


def test_it_is_the_package_s_api() -> None:
    assert pdserve.LLM is LLM


def test_a_batch_is_in_order_and_each_as_alone(llm: LLM) -> None:
    prompts = [f"number {n}, " + "x" * n for n in range(10)]  # more than may wait at once
    together = llm.generate(prompts, GREEDY)
    assert [r.prompt_ids for r in together] == [
        tuple(llm.tokenizer.encode(p, add_special_tokens=True, parse_special=True)) for p in prompts
    ]
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.completions == result.completions
        assert len(alone.completions[0].token_ids) == 12
        assert alone.completions[0].finish_reason == "length"
    assert len({r.text for r in together}) > 1


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    (by_text,) = llm.generate("hello", GREEDY)
    (by_ids,) = llm.generate(list(by_text.prompt_ids), GREEDY)
    both = llm.generate([list(by_text.prompt_ids), "hello"], GREEDY)
    assert by_text.text == by_ids.text == both[0].text == both[1].text


def test_a_seed_repeats_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3)
    first, again, other = (llm.generate("hi", params, seed=s)[0] for s in (7, 7, 8))
    assert first.completions == again.completions
    assert first.completions != other.completions
    assert len({c.token_ids for c in first.completions}) == 3


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0
    )
    (result,) = llm.generate("hello", params)
    scores = result.completions[0].logprobs
    assert [s.top[0][0] for s in scores] == list(result.completions[0].token_ids)
    assert all(s.logprob == s.top[0][1] <= 0 for s in scores)
    assert len(result.prompt_logprobs) == len(result.prompt_ids) - 1


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    stop = plain.text[3:5]
    (stopped,) = llm.generate("hello", GREEDY, stop=[stop])
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.completions[0].finish_reason == "stop"
    assert len(stopped.completions[0].token_ids) < 12


def test_chat_and_stream_give_the_same_answer(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = llm.chat(messages, GREEDY)
    deltas = list(llm.stream(messages, GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert len(deltas) > 3
    assert llm.tokenizer.decode(whole.prompt_ids, skip_special_tokens=False).endswith("assistant\n")


def test_streams_share_the_batch(llm: LLM) -> None:
    first = llm.stream("one", GREEDY)
    second = llm.stream("two", GREEDY)
    mixed = [next(first).text, next(second).text]
    mixed[0] += "".join(d.text for d in first)
    mixed[1] += "".join(d.text for d in second)
    assert mixed == [llm.generate(p, GREEDY)[0].text for p in ("one", "two")]


def test_a_closed_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("x", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    next(iter(stream))
    busy = llm._thread.post(lambda engine: engine.stats()).result()
    assert busy.running == 1
    stream.close()  # type: ignore[attr-defined]
    free = llm._thread.post(lambda engine: engine.stats()).result()
    assert free.running == 0
    assert free.blocks.free + free.blocks.cached == free.blocks.total
    assert not llm._inboxes


def test_what_the_engine_refuses_is_raised(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate("x" * 2000, GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", [99999]], GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(TextError):
        llm.chat([{"role": "wizard", "content": "x"}])
    assert not llm._inboxes
    assert llm.generate("still there", GREEDY)[0].text


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="--block-size"):
        LLM("x", block_size=0)
    with pytest.raises(OptionError, match="--weights"):
        LLM("x", weights="int3")
    with pytest.raises(TypeError, match="blocksize"):
        LLM("x", blocksize=1)


def test_defaults_come_from_the_model(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7}')
    with LLM(str(tmp_path), **OPTIONS) as made:
        assert (made.defaults.temperature, made.defaults.top_k) == (0.25, 7)


def test_close_ends_what_runs_and_may_be_repeated(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    stream = llm.stream("x", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    next(iter(stream))
    llm.close()
    llm.close()
    with pytest.raises(GenerationError, match="closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
    assert not llm._thread._thread.is_alive()


def test_a_script_that_forgets_close_still_ends(folder: Path) -> None:
    code = (
        "import pdserve\n"
        f"llm = pdserve.LLM({str(folder)!r}, kv_tokens=512, chunk_size=64)\n"
        "print(len(llm.generate('x')[0].prompt_ids))\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_grammars(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, max_tokens=60, n=3, grammar=of_regex("[a-d]{5}-[0-9]{2,4};")
    )
    first, again = (llm.generate("hi", params, seed=4)[0] for _ in range(2))
    assert first == again
    assert all(re.fullmatch("[a-d]{5}-[0-9]{2,4};", c.text) for c in first.completions)
    assert {c.finish_reason for c in first.completions} == {"stop"}
    with pytest.raises(InvalidRequest) as refused:
        llm.generate("hi", SamplingParams(grammar=of_regex("(")))
    assert refused.value.param == "grammar"
