"""Vectors and scores of encoders from the engine equal transformers'. On the native kernels they
are the same bit for bit alone and in a batch."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, of, run
from builders.tiny_embedder import Oracle
from builders.tiny_encoder import ENCODERS, write_encoder, write_scorer
from builders.tiny_models import write_tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification

from pdserve.engine.api import (
    ContextLengthExceeded,
    EngineConfig,
    InvalidRequest,
    Pooled,
    Request,
    RequestFailed,
)
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.engine import Engine

LENGTHS = (1, 2, 5, 17, 64, 65, 90, 150)  # below and beyond a tile of keys and a window
POOLINGS = {"bert": "cls", "xlm_roberta": "mean", "modernbert": "last"}
MODES = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
IDENTITY = "torch.nn.modules.linear.Identity"
# Architectures with settings of their heads, and whether the score is the sigmoid of the result.
HEADS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    *((arch, {}, True) for arch in ENCODERS),
    ("bert", {"sbert_ce_default_activation_function": IDENTITY}, False),
    ("xlm_roberta", {"sentence_transformers": {"activation_fn": IDENTITY}}, False),
    ("modernbert", {"classifier_pooling": "mean"}, True),
    ("modernbert", {"classifier_bias": True, "norm_bias": True}, True),
)


def engine_of(path: Path, kernels: str = "native", **options: Any) -> Engine:
    return build_engine(EngineConfig(str(path), kernels=kernels, chunk_size=64, **options))[0]


def requests() -> list[Request]:
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 300) for _ in range(length)] for length in LENGTHS]
    prompts += [[0, 1, 5, 2], [1, 1, 7, 1, 8, 2]]  # 1: padding, which RoBERTa does not count
    return [replace(ask(f"r{len(ids)}", ids), pool=True) for ids in prompts]


def vectors(engine: Engine, *texts: Request) -> dict[str, tuple[float, ...]]:
    return {event.key: event.values for event in of(run(engine, *texts), Pooled)}


def test_vectors_equal_those_of_transformers(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for arch in ENCODERS:
        path = write_encoder(tmp_path / arch, arch, MODES[POOLINGS[arch]])
        oracle = Oracle(path, POOLINGS[arch])
        want = {r.key: oracle.pooled(r.prompt_ids) for r in requests()}
        for kernels in ("reference", "native"):
            with subtests.test(arch, kernels=kernels):
                together = vectors(engine_of(path, kernels), *requests())
                for key, vector in want.items():
                    got = torch.tensor(together[key])
                    torch.testing.assert_close(got, vector, atol=1e-4, rtol=1e-4)
        with subtests.test(arch, alone=True):
            engine = engine_of(path, threads=1)
            alone = {key: v for r in requests() for key, v in vectors(engine, r).items()}
            assert alone == together


def test_scores_equal_those_of_transformers(subtests: pytest.Subtests, tmp_path: Path) -> None:
    pairs = [("what is it?", "the thing."), ("a", "b. " * 30), ("who, me", "a")]
    for number, (arch, settings, has_sigmoid) in enumerate(HEADS):
        path = write_scorer(tmp_path / str(number), arch, **settings)
        model = AutoModelForSequenceClassification.from_pretrained(
            path, attn_implementation="eager"
        ).eval()
        library = Tokenizer.from_file(str(path / "tokenizer.json"))
        library.no_padding()
        frames, want = [], {}
        for pair in pairs:
            encoded = library.encode(*pair)
            ids = torch.tensor([encoded.ids])
            fields = {"token_type_ids": torch.tensor([encoded.type_ids])} if arch == "bert" else {}
            fields["attention_mask"] = torch.ones_like(ids)
            with torch.inference_mode():
                logits = model(ids, **fields).logits
            frames.append(replace(ask(pair[0], encoded.ids), pool=True))
            want[pair[0]] = float(torch.sigmoid(logits) if has_sigmoid else logits)
        for kernels in ("reference", "native"):
            with subtests.test(arch, **settings, kernels=kernels):
                pooled = vectors(engine_of(path, kernels), *frames)
                scores = {key: score for key, (score,) in pooled.items()}
                assert scores == pytest.approx(want, abs=1e-4)
                assert len({round(score, 3) for score in scores.values()}) == len(pairs)
    with subtests.test("several labels"):
        path = write_scorer(tmp_path / "labels", "bert", num_labels=3)
        with pytest.raises(CheckpointError, match="id2label gives 3 labels"):
            engine_of(path)


def test_decoders_with_a_head_score_as_transformers(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for arch in ("llama", "qwen2", "qwen3"):
        path = write_tiny(
            tmp_path / arch, arch, head="ForSequenceClassification", num_labels=1, pad_token_id=0
        )
        model = AutoModelForSequenceClassification.from_pretrained(
            path, attn_implementation="eager"
        ).eval()
        texts = [replace(ask(f"r{n}", range(9, 9 + n)), pool=True) for n in (1, 40, 130)]
        with torch.inference_mode():
            logits = [model(torch.tensor([list(one.prompt_ids)])).logits for one in texts]
        want = {one.key: float(torch.sigmoid(x)) for one, x in zip(texts, logits, strict=True)}
        with subtests.test(arch):
            engine = engine_of(path, kv_dtype="float32")
            first = {key: score for key, (score,) in vectors(engine, *texts).items()}
            assert first == pytest.approx(want, abs=1e-4)
            again = {key: score for key, (score,) in vectors(engine, *texts).items()}
            assert again == first, "a hit of the prefix cache changes a score"


def test_a_pair_needs_a_special_token_between_its_texts(tmp_path: Path) -> None:
    file = write_scorer(tmp_path, "bert") / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "post_processor": None}))
    with pytest.raises(CheckpointError, match="does not frame pairs with special tokens"):
        engine_of(tmp_path)


def test_a_head_needs_a_prompt_for_pairs(tmp_path: Path) -> None:
    """A tokenizer may put nothing between two texts, as Qwen2.5's and Qwen3's."""
    head = "ForSequenceClassification"
    path = write_tiny(tmp_path, "qwen2", head=head, num_labels=1, pad_token_id=0)
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.post_processor = None
    tokenizer.save(file)
    with pytest.raises(CheckpointError, match="tokens of Qwen3-Reranker's prompt: <think>, </"):
        engine_of(path)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(file)
    assert vectors(engine_of(path), replace(ask("a", [5, 6]), pool=True))


def test_a_score_that_is_not_finite_fails_the_request(tmp_path: Path) -> None:
    identity = {"sbert_ce_default_activation_function": IDENTITY}
    path = write_scorer(tmp_path, "bert", **identity)
    tensors = load_file(path / "model.safetensors")
    tensors["classifier.weight"].fill_(torch.finfo(torch.float32).max)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (failed,) = of(run(engine_of(path), replace(ask("a", [5, 6]), pool=True)), RequestFailed)
    assert failed.message == "the score is not finite"


def test_early_names_of_norms(tmp_path: Path) -> None:
    path = write_encoder(tmp_path, "bert")
    want = vectors(engine_of(path), *requests())
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in list(tensors):
        module, _, leaf = name.rpartition(".")
        if module.endswith("LayerNorm"):
            tensors[f"{module}.{'gamma' if leaf == 'weight' else 'beta'}"] = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    assert vectors(engine_of(path), *requests()) == want


def test_what_an_encoder_does_not_do(
    subtests: pytest.Subtests, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_encoder(tmp_path, "xlm_roberta", mode="")
    engine = engine_of(path)
    with subtests.test("longer than its positions"):
        assert engine.limits.context_len == 198  # 2 of 200 rows belong to ids of padding
        assert vectors(engine, replace(ask("whole", [7] * 198), pool=True))
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 198 tokens"):
            engine.submit(replace(ask("more", [7] * 199), pool=True))
    with subtests.test("chunks"):
        reason = "a step of an encoder computes a whole text of up to 198 tokens"
        assert f"--chunk-size 64 has no effect: {reason}" in caplog.text
        with pytest.raises(ValueError, match=rf"--max-running 64 \+ 198: {reason}"):
            engine_of(path, step_tokens=64 + 197)
    with subtests.test("pooling of a head that scores"):
        scorer = write_scorer(tmp_path / "scorer", "xlm_roberta")
        with pytest.raises(CheckpointError, match="--pooling mean: the model has a head that can"):
            engine_of(scorer, pooling="mean")
    with subtests.test("text"):
        with pytest.raises(InvalidRequest, match="does not support text generation"):
            engine.submit(ask("a", [5, 6]))
        with pytest.raises(CheckpointError, match="no output head and can only embed"):
            engine_of(path, task="generate")
    with subtests.test("prefix cache"):
        request = replace(ask("a", [9] * 80), pool=True)
        first = vectors(engine, request)
        assert vectors(engine, request) == first
        assert not engine.chain(request)
    with subtests.test("without files of sentence-transformers"):
        want = Oracle(path, "mean").pooled(request.prompt_ids)
        torch.testing.assert_close(torch.tensor(first["a"]), want, atol=1e-4, rtol=1e-4)
