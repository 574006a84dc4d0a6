"""The in-process LLM on a tiny model: batches, stop strings, streams, and a clean end."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from builders.tiny_embedder import Oracle, write_embedder
from builders.tiny_encoder import write_scorer
from builders.tiny_models import write_tiny
from systems.llm_kit import engine_threads, is_idle, model_of, slow, stats

import pdserve
from pdserve.engine.api import ContextLengthExceeded, EngineConfig, InvalidRequest
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.execution import DeviceLost
from pdserve.llm.llm import LLM
from pdserve.llm.outputs import GenerationError
from pdserve.llm.sampling import SamplingParams, StructuredOutputsParams

OPTIONS: dict[str, Any] = {"kv_tokens": 2048, "chunk_size": 64, "max_running": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


def bound_by(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form))


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


def test_a_generating_model_refuses_embeddings(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="The model does not support Embeddings API"):
        llm.embed("hello")


def test_a_cross_encoder_refuses_embeddings(tmp_path: Path) -> None:
    with (
        LLM(str(write_scorer(tmp_path, "bert")), max_waiting=4, **OPTIONS) as scorer,
        pytest.raises(InvalidRequest, match="scores pairs of texts; it does not embed"),
    ):
        scorer.embed("hello")


def test_a_generating_model_embeds_with_the_task(folder: Path, subtests: pytest.Subtests) -> None:
    """Return the same numbers bit for bit alone and in a batch, and others with each pooling."""
    texts = ["a", "hello world", "three rivers " * 9]
    found: list[list[float]] = []
    for pooling in ("last", "mean"):
        with (
            subtests.test(pooling),
            LLM(str(folder), task="embed", pooling=pooling, **OPTIONS) as llm,
        ):
            batch = llm.embed(texts)
            assert [llm.embed(text)[0] for text in texts] == batch
            found.append(batch[1])
        with subtests.test(pool=pooling), LLM(str(folder), pool=pooling, **OPTIONS) as both:
            assert both.embed(texts) == batch
            assert both.generate("hello", GREEDY)[0].text
    assert found[0] != found[1]


def test_a_lost_device_fails_running_and_later_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(engine: object, pending: object) -> NoReturn:
        raise DeviceLost("an illegal memory access")

    with LLM(str(folder), **OPTIONS) as llm:
        monkeypatch.setattr("pdserve.engine.engine.Engine.collect", lost)
        for _ in range(2):
            with pytest.raises(
                GenerationError, match="the device is lost: an illegal memory access"
            ):
                llm.generate("hi", GREEDY)


def test_the_package_exports_the_llm_class() -> None:
    assert pdserve.LLM is LLM


def test_a_batch_is_in_order_and_equals_single_requests(llm: LLM) -> None:
    prompts = [f"number {n}, " + "x" * n for n in range(10)]  # more than may wait at once
    together = llm.generate(prompts, GREEDY)
    assert [r.prompt_token_ids for r in together] == [
        tuple(llm.tokenizer.encode(p, add_special_tokens=True, parse_special=True)) for p in prompts
    ]
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs == result.outputs
        assert len(alone.outputs[0].token_ids) == 12
        assert alone.outputs[0].finish_reason == "length"
    assert len({r.text for r in together}) > 1


def test_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    (by_text,) = llm.generate("hello", GREEDY)
    (by_ids,) = llm.generate(list(by_text.prompt_token_ids), GREEDY)
    both = llm.generate([list(by_text.prompt_token_ids), "hello"], GREEDY)
    assert by_text.text == by_ids.text == both[0].text == both[1].text


def test_a_seed_repeats_and_choices_differ(llm: LLM) -> None:
    first, again, other = (
        llm.generate("hi", replace(SAMPLED, n=3, seed=seed))[0] for seed in (7, 7, 8)
    )
    assert first.outputs == again.outputs
    assert first.outputs != other.outputs
    assert len({c.token_ids for c in first.outputs}) == 3


def test_logprobs(llm: LLM) -> None:
    (result,) = llm.generate("hello", replace(GREEDY, logprobs=2, prompt_logprobs=0))
    (output,) = result.outputs
    assert output.logprobs is not None
    for token, scores in zip(output.token_ids, output.logprobs, strict=True):
        assert len(scores) == 2
        assert next(iter(scores)) == token
        assert scores[token].logprob == max(s.logprob for s in scores.values()) <= 0
        assert scores[token].decoded_token == llm.tokenizer.token_text(token)
    own = [s[i].logprob for s, i in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(own))
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for token, scored in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert scored is not None
        assert list(scored) == [token]
    (plain,) = llm.generate("hello", GREEDY)
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs) == (None, None)


def test_a_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    stop = plain.text[3:5]
    (stopped,) = llm.generate("hello", replace(GREEDY, stop=stop))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert len(stopped.outputs[0].token_ids) < 12
    (kept,) = llm.generate("hello", replace(GREEDY, stop=[stop], include_stop_str_in_output=True))
    assert kept.text == stopped.text + stop
    token = plain.outputs[0].token_ids[4]
    (by_id,) = llm.generate("hello", replace(GREEDY, stop_token_ids=[token]))
    assert by_id.outputs[0].stop_reason == by_id.outputs[0].token_ids[-1] == token


def test_a_stop_string_ends_a_later_prompt_while_an_earlier_one_runs(llm: LLM) -> None:
    """The second request must not run to its max_tokens while the first is read."""
    (plain,) = llm.generate("hello", GREEDY)
    long = replace(GREEDY, max_tokens=300)
    found = llm.generate(["x", "hello"], [long, replace(long, stop=plain.text[3:5])])
    lengths = [len(one.outputs[0].token_ids) for one in found]
    assert lengths[0] == 300
    assert lengths[1] < 12
    assert is_idle(llm)


def test_chat_and_stream_give_the_same_answer(llm: LLM) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = llm.chat(messages, GREEDY)
    deltas = list(llm.chat_stream(messages, GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert len(deltas) > 3
    assert llm.tokenizer.decode(whole.prompt_token_ids, skip_special_tokens=False).endswith(
        "assistant\n"
    )


def test_streams_share_the_batch(llm: LLM) -> None:
    first = llm.generate_stream("one", GREEDY)
    second = llm.generate_stream("two", GREEDY)
    mixed = [next(first).text, next(second).text]
    mixed[0] += "".join(d.text for d in first)
    mixed[1] += "".join(d.text for d in second)
    assert mixed == [llm.generate(p, GREEDY)[0].text for p in ("one", "two")]


def test_a_closed_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.generate_stream(
        "x", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    )
    with slow(llm):
        next(iter(stream))
        assert stats(llm).running == 1
        stream.close()
    assert stats(llm).running == 0
    assert is_idle(llm)


def test_invalid_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length"):
        llm.generate("x" * 2000, GREEDY)
    wrong: list[tuple[type[Exception], str, Any, Callable[[], Any]]] = [
        (InvalidRequest, "outside the vocabulary", "prompt", lambda: llm.generate(["a", [99999]])),
        (InvalidRequest, "not a token id", "prompt", lambda: llm.generate(["a", ["b"]])),
        (InvalidRequest, "role", "messages[0].role", lambda: llm.chat([{"role": "wizard"}])),
        (TypeError, "not int", None, lambda: llm.generate(5)),  # type: ignore[arg-type]
        (TypeError, "not NoneType", None, lambda: llm.generate(["a", None])),  # type: ignore[list-item]
        (TypeError, "not bytes", None, lambda: llm.generate(b"a")),  # type: ignore[arg-type]
        (TypeError, "list of messages", None, lambda: llm.chat("hello")),  # type: ignore[call-overload]
        (TypeError, "pdserve.SamplingParams", None, lambda: llm.generate("a", {"n": 1})),  # type: ignore[arg-type]
        (
            ValueError,
            "sampling_params has 1 values for 2 prompts",
            None,
            lambda: llm.generate(["a", "b"], [GREEDY]),
        ),
        (
            ValueError,
            "priority has 1 values for 2 prompts",
            None,
            lambda: llm.generate(["a", "b"], priority=[1]),
        ),
        (InvalidRequest, "whole number", "priority", lambda: llm.generate("a", priority="high")),  # type: ignore[arg-type]
        (TypeError, "not dict", None, lambda: llm.generate({"prompt_token_ids": [1]})),  # type: ignore[arg-type]
        (TypeError, "'tool'", None, lambda: llm.chat(HI, tool=[])),  # type: ignore[call-overload]
    ]
    for kind, text, param, call in wrong:
        with pytest.raises(kind, match=text) as caught:
            call()
        assert getattr(caught.value, "param", None) == param
    assert is_idle(llm)
    assert llm.generate("still there", GREEDY)[0].text
    assert llm.generate([]) == []


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="block_size: 0 is below 1"):
        LLM("x", block_size=0)
    with pytest.raises(ValueError, match="weights: 'int3' is not one of"):
        LLM("x", weights="int3")
    with pytest.raises(ValueError, match="threads"):
        LLM("x", threads=-1)
    with pytest.raises(TypeError, match="no option 'blocksize'; did you mean block_size"):
        LLM("x", blocksize=1)
    with pytest.raises(TypeError, match="not both"):
        LLM(EngineConfig(), block_size=1)
    with pytest.raises(TypeError, match="not int"):
        LLM(5)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no model 'nothing/'"):
        LLM("nothing/")


def test_a_path_is_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none"):
        LLM(tmp_path / "none")


def test_parsers_are_checked(folder: Path) -> None:
    before = engine_threads()
    with pytest.raises(ValueError, match="tool_parser: 'hermse' is not one of auto, none, "):
        LLM(str(folder), tool_parser="hermse", **OPTIONS)
    assert engine_threads() == before


def test_defaults_come_from_the_model(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    recommended = '{"temperature": 0.25, "top_k": 7, "max_tokens": 5}'
    (tmp_path / "generation_config.json").write_text(recommended)
    with LLM(str(tmp_path), **OPTIONS) as made:
        defaults = made.default_sampling_params()
        assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.25, 7, 1.0)
        made_params = model_of(made).prompts.text("x", SamplingParams(top_p=0.5), 0).request.params
        assert (made_params.temperature, made_params.top_k, made_params.top_p) == (0.25, 7, 0.5)
        assert (defaults.max_tokens, made_params.max_tokens) == (5, 5)
        windowed = SamplingParams(presence_penalty=1, penalty_window=9)
        made_params = model_of(made).prompts.text("x", windowed, 0).request.params
        assert (made_params.presence_penalty, made_params.penalty_window) == (1, 9)


def test_close_ends_running_requests_and_may_be_repeated(folder: Path) -> None:
    before = engine_threads()
    llm = LLM(str(folder), **OPTIONS)
    assert engine_threads() == before + 1
    stream = llm.generate_stream(
        "x", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    )
    with slow(llm):
        next(iter(stream))
        llm.close()
        llm.close()
    with pytest.raises(GenerationError, match="closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")
    assert engine_threads() == before


def test_a_script_without_close_still_ends(folder: Path) -> None:
    code = (
        "import pdserve\n"
        f"llm = pdserve.LLM({str(folder)!r}, kv_tokens=512, chunk_size=64)\n"
        "print(len(llm.generate('x')[0].prompt_token_ids))\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, env=env
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_several_threads_share_the_batch(llm: LLM) -> None:
    """More requests than may be queued at once wait for their turn."""
    prompts = [f"thread {n}" for n in range(12)]
    with ThreadPoolExecutor(3) as pool:
        halves = pool.map(lambda part: llm.generate(part, GREEDY), (prompts[:6], prompts[6:]))
        found = [one.text for half in halves for one in half]
    assert found == [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]


def test_unread_streams_leave_room(llm: LLM) -> None:
    """As many as may be queued are started and abandoned; their requests end all the same."""
    streams = [llm.generate_stream(f"{n}", GREEDY) for n in range(4)]
    for stream in streams:
        next(stream)
    assert llm.generate("more", GREEDY)[0].text
    for stream in streams:
        stream.close()
    assert is_idle(llm)


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([f"{n}" for n in range(8)], GREEDY, progress=True)
    shown = capsys.readouterr().err.splitlines()
    assert shown[-4:] == [f"prompts {n}%" for n in (25, 50, 75, 100)]
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-d]{5}-[0-9]{2,4};"}, "[a-d]{5}-[0-9]{2,4};"),
        ({"choice": ["ab", "cd"]}, "ab|cd"),
        ({"grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        ({"json": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_structured_outputs(llm: LLM, form: dict[str, Any], pattern: str) -> None:
    params = replace(bound_by(**form), max_tokens=60, n=3, seed=4)
    first, again = (llm.generate("hi", params)[0] for _ in range(2))
    assert first.outputs == again.outputs
    assert all(re.fullmatch(pattern, output.text) for output in first.outputs)
    assert {output.finish_reason for output in first.outputs} == {"stop"}


def test_more_grammars_than_may_wait_are_compiled_in_turn(folder: Path) -> None:
    params = [replace(bound_by(regex=f"{n:03}"), max_tokens=9) for n in range(80)]
    with LLM(str(folder), kv_tokens=4096, chunk_size=64, max_running=8) as llm:
        found = llm.generate([f"prompt {n}" for n in range(80)], params)
        assert [one.text for one in found] == [f"{n:03}" for n in range(80)]
        assert is_idle(llm)


def test_an_impossible_structure_is_reported(llm: LLM) -> None:
    tag = {"begin": "a", "schema": {"enum": [1]}, "end": "b"}
    for form, text, param in [
        ({"regex": "("}, "invalid regular expression", "structured_outputs.regex"),
        ({"json": {"contains": {}}}, "contains", "structured_outputs.json"),
        ({"json": "{"}, "not valid JSON", "structured_outputs.json"),
        ({"choice": []}, "must not be empty", "structured_outputs.choice"),
        ({"structural_tag": {"structures": [{}], "triggers": ["a"]}}, "begin, schema and end",
         "structured_outputs.structural_tag.structures"),
        ({"structural_tag": {"structures": [{**tag, "begin": 1}], "triggers": ["a"]}}, "strings",
         "structured_outputs.structural_tag.structures"),
        ({"structural_tag": {"structures": [tag], "triggers": ["a"], "or": {}}}, "nothing else",
         "structured_outputs.structural_tag"),
        ({"structural_tag": {"structures": 1, "triggers": ["a"]}}, "must be a list",
         "structured_outputs.structural_tag.structures"),
        ({"structural_tag": {"structures": [tag], "triggers": []}}, "not empty",
         "structured_outputs.structural_tag"),
        ({}, "needs one of", "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "not regex and choice", "structured_outputs"),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequest, match=text) as refused:
            llm.generate("hi", bound_by(**form))  # type: ignore[arg-type]
        assert refused.value.param == param
    with pytest.raises(InvalidRequest, match="min_tokens cannot be combined") as refused:
        llm.generate("hi", replace(bound_by(regex="a"), min_tokens=2))
    assert refused.value.param == "min_tokens"


def test_bad_words_and_allowed_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc", add_special_tokens=False, parse_special=False)
    few = replace(GREEDY, allowed_token_ids=ids)
    (plain,) = llm.generate("hello", few)
    assert {*plain.outputs[0].token_ids} <= {*ids, *llm.card.eos_ids}
    word = plain.text[:2]
    (other,) = llm.generate("hello", replace(few, bad_words=[word]))
    assert other.text
    assert word not in other.text
