"""GGUF files of encoders give the vectors, scores and token ids of their safetensors."""

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.charsmap import charsmap
from builders.encoder_gguf import write_encoder_gguf
from builders.encoder_tokenizers import encoder_tokenizer
from builders.engine_kit import ask, of, run
from builders.hard_strings import HARD_STRINGS
from builders.tiny_encoder import ENCODERS, write_encoder, write_scorer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

from pdserve.engine.api import EngineConfig, Pooled
from pdserve.engine.architectures import parse_config
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CardData, CheckpointError
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.engine.load import load_model, open_checkpoint

MODES = {"bert": "cls_token", "xlm_roberta": "mean_tokens", "modernbert": "lasttoken"}
LARGER = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PROMPTS = ([5], [7, 9, 2, 11] * 9, list(range(10, 150)))
PAIRS = (("what is it?", "the thing."), ("a", "b. " * 30))
TEXTS = (
    *HARD_STRINGS,
    "Élan naïve coöperate Ångström",
    "中文字符 mixed中text",
    "don't, stop! (really?) [SEP] <mask>",
    "thing " * 3 + "z" * 101,
    "bathing 日本 \t\n x",
)
TYPES = "embeddings.token_type_embeddings.weight"
KEY = "tokenizer.ggml."


def vectors(path: Path, prompts: Any = PROMPTS, **options: Any) -> tuple[CardData, list[Any]]:
    """Return the card, and the pooled state of each prompt."""
    engine, card = build_engine(EngineConfig(str(path), **options))
    requests = [replace(ask(str(n), ids), pool=True) for n, ids in enumerate(prompts)]
    pooled = {event.key: event.values for event in of(run(engine, *requests), Pooled)}
    return card, [pooled[request.key] for request in requests]


def frames(path: Path) -> list[tuple[list[int], list[int]]]:
    """Return the ids and types of each text, alone and in a pair, by a model's own tokenizer."""
    tokenizer = Tokenizer.from_buffer(open_checkpoint(path).text_files().tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    alone = [tokenizer.encode(text) for text in TEXTS]
    pairs = [tokenizer.encode(text, "the other") for text in TEXTS]
    return [(encoded.ids, encoded.type_ids) for encoded in (*alone, *pairs)]


def close(one: Any, other: Any, tolerance: float = 1e-4) -> bool:
    return all(a == pytest.approx(b, abs=tolerance) for a, b in zip(one, other, strict=True))


def cosine(one: Any, other: Any) -> float:
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


def test_vectors_equal_those_of_safetensors(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for arch in ENCODERS:
        folder = write_encoder(tmp_path / arch, arch, MODES[arch], **LARGER)
        for kind in ("F32", "Q8_0"):
            with subtests.test(arch, kind=kind):
                file, rounded = tmp_path / f"{arch}-{kind}.gguf", tmp_path / f"{arch}-{kind}"
                write_encoder_gguf(folder, file, kind, rounded=rounded)
                exact: dict[str, Any] = {"kernels": "reference", "weights": "float32"}
                card, want = vectors(rounded, **exact)
                read, got = vectors(file, **exact)
                assert close(got, want)
                assert (read.pooling, read.normalizes) == (card.pooling, card.normalizes)
                assert read.is_encoder
                assert read.context_len == card.context_len
                native = vectors(file)[1]
                assert close(native, want, 1e-4 if kind == "F32" else 0.2)
                assert all(cosine(a, b) > 0.995 for a, b in zip(native, want, strict=True))


def test_scores_equal_those_of_safetensors(subtests: pytest.Subtests, tmp_path: Path) -> None:
    mean = {"classifier_pooling": "mean"}  # early files of ModernBERT do not state it
    cases: tuple[tuple[str, dict[str, Any], tuple[bool, ...]], ...] = (
        ("bert", {}, (False, True)),
        ("xlm_roberta", {}, (False, True)),
        ("modernbert", {}, (False,)),
        ("modernbert", mean, (False, True)),
    )
    for n, (arch, settings, ages) in enumerate(cases):
        folder = write_scorer(tmp_path / str(n), arch, **settings)
        library = encoder_tokenizer(arch)
        library.no_padding()
        prompts = [library.encode(*pair).ids for pair in PAIRS]
        _, want = vectors(folder, prompts)
        assert not close([want[0]], [want[1]], 1e-3)
        for early in ages:
            with subtests.test(arch, early=early, **settings):
                file = tmp_path / f"{n}-{early}.gguf"
                write_encoder_gguf(folder, file, early=early, left_out=())
                card, got = vectors(file, prompts)
                assert card.scores_pairs
                assert close(got, want)


def test_layers_of_modernbert(subtests: pytest.Subtests, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "hf", "modernbert")
    whole = parse_config(open_checkpoint(folder).hf_config)
    window, base = "modern-bert.attention.sliding_window", "modern-bert.rope.freq_base"
    full, local = whole.layers[:2]
    for metadata, layers in (
        ({}, (full, local, local)),
        ({f"{window}_pattern": None}, (full, local, local)),
        ({f"{window}_pattern": [True, False, True]}, (local, full, local)),
        ({f"{window}_pattern": 2}, (full, local, full)),
        ({window: None, f"{window}_pattern": None}, (full,) * 3),
        ({f"{base}_swa": None}, (full, local, local)),  # 10,000, as in the folder
        ({base: None}, (replace(full, rope=local.rope), local, local)),
        ({"modern-bert.attention.layer_norm_epsilon": None}, whole.layers),
    ):
        with subtests.test(**metadata):
            file = write_encoder_gguf(folder, tmp_path / "m.gguf", **metadata)
            got = parse_config(open_checkpoint(file).hf_config)
            assert got.layers == layers
            assert got.activation == whole.activation
            assert got.norm_eps == pytest.approx(whole.norm_eps)
    silu = {"modern-bert.hidden_activation": "silu"}
    file = write_encoder_gguf(folder, tmp_path / "silu.gguf", **silu)
    assert parse_config(open_checkpoint(file).hf_config).activation == "silu"


def test_an_encoder_without_token_types(tmp_path: Path) -> None:
    """DistilBERT is BERT without them, and its files say that they are of BERT."""
    folder = write_encoder(tmp_path / "hf", "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors[TYPES].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = write_encoder_gguf(folder, tmp_path / "m.gguf", left_out=("pooler.", TYPES))
    assert close(vectors(file)[1], vectors(folder)[1])


def test_pooling_and_normalization(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_encoder(tmp_path / "hf", "bert")
    stated = {"bert.pooling_type": 2, "bert.normalize_embeddings": False}
    unstated = {"bert.pooling_type": None}
    for changes, pooling, normalizes in ((unstated, "mean", True), (stated, "cls", False)):
        path = write_encoder_gguf(folder, tmp_path / "m.gguf", **changes)
        caplog.clear()
        card = load_model(EngineConfig(str(path)), lambda *_: None).card
        assert (card.pooling, card.normalizes) == (pooling, normalizes)
        assert ("the model's files define no pooling" in caplog.text) == (changes is not stated)


def test_tokens_equal_those_of_safetensors(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for arch in ENCODERS:
        folder = write_encoder(tmp_path / arch, arch)
        if arch == "xlm_roberta":
            file = folder / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
            tokenizer.normalizer = normalizers.Precompiled(charsmap({"É": "e", "ﬁ": "fi"}))
            tokenizer.save(str(file))
        for early in (False, True):
            with subtests.test(arch, early=early):
                path = write_encoder_gguf(folder, tmp_path / f"{arch}-{early}.gguf", early=early)
                for text, got, want in zip(TEXTS * 2, frames(path), frames(folder), strict=True):
                    assert got == want, text


def test_capitals_and_accents_of_the_vocabulary_are_kept() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581é", "\u2581e", "a", "\u2581E", "A"]
    metadata: dict[str, Any] = {
        "general.architecture": "bert",
        KEY + "model": "bert",
        KEY + "tokens": tokens[:7],
        KEY + "token_type": array("i", [3, 3, 3, 3, 1, 1, 1]),
    }
    cased = {KEY + "tokens": tokens, KEY + "token_type": array("i", [3, 3, 3, 3, 1, 1, 1, 1, 1])}
    lowercase = KEY + "normalizer.lowercase"
    for change, want in (
        ({}, [2, 4, 6, 3]),
        ({KEY + "tokens": [*tokens[:4], "\u2581x", *tokens[5:7]]}, [2, 5, 6, 3]),  # without é
        (cased, [2, 1, 3]),
        ({**cased, lowercase: True}, [2, 4, 6, 3]),
        ({lowercase: False}, [2, 1, 3]),
        ({lowercase: False, KEY + "normalizer.strip_accents": True}, [2, 1, 3]),
        ({KEY + "strip_accents": True}, [2, 5, 6, 3]),  # Ollama's converter
        ({KEY + "normalizer.strip_accents": True}, [2, 5, 6, 3]),
    ):
        tokenizer = Tokenizer.from_buffer(tokenizer_json({**metadata, **change}))
        assert tokenizer.encode("ÉA").ids == want, change
        assert tokenizer.encode("ea").ids == [2, 5, 6, 3]


def test_frames_of_roberta_and_modernbert() -> None:
    """Both have byte-level BPE; RoBERTa's pairs have two tokens between the texts."""
    metadata = {
        KEY + "model": "gpt2",
        KEY + "pre": "roberta-bpe",
        KEY + "tokens": ["<s>", "</s>", "a", "b", "ab"],
        KEY + "token_type": array("i", [3, 3, 1, 1, 1]),
        KEY + "merges": ["a b"],
        KEY + "bos_token_id": 0,
        KEY + "eos_token_id": 1,
        KEY + "add_bos_token": False,
    }
    for arch, between in (("bert", [1, 1]), ("modern-bert", [1])):
        tokenizer = Tokenizer.from_buffer(
            tokenizer_json({"general.architecture": arch, **metadata})
        )
        assert tokenizer.encode("ab").ids == [0, 4, 1]
        pair = tokenizer.encode("ab", "b")
        assert pair.ids == [0, 4, *between, 3, 1]
        assert set(pair.type_ids) == {0}
    composed = tokenizer_json({**metadata, KEY + "pre": "modern-bert", KEY + "tokens": [*"abcde"]})
    assert json.loads(composed)["normalizer"] == {"type": "NFC"}


def test_unusable_files_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    embedder = write_encoder(tmp_path / "embedder", "bert")
    unigram = write_encoder(tmp_path / "unigram", "xlm_roberta")
    scorer = write_scorer(tmp_path / "scorer", "bert")
    several = write_scorer(tmp_path / "several", "xlm_roberta", num_labels=3)
    scores = KEY + "scores"
    table = charsmap({"é": "e"})
    outside = table[:4] + b"\0\0\0\x40" + table[8:]  # the root's children
    leaf = table[:4] + b"\0\x02\0\x80" + table[8:]  # the root is marked as a leaf
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (embedder, {"bert.attention.causal": True}, "attention.causal is true: expected an enc"),
        (embedder, {"bert.pooling_type": 4}, "pooling_type is rank: only mean, cls and last are"),
        (embedder, {"bert.alibi": 8.0}, "metadata keys of bert are not supported: .*alibi"),
        (embedder, {KEY + "tokens": ["▁a"] * 300}, "is not one of WordPiece"),
        (embedder, {KEY + "tokens": ["▁a", "#", "▁▁a"] * 100}, "is not one of WordPiece"),
        (
            embedder,
            {KEY + "tokens": ["a"] * 300, KEY + "unknown_token_id": None},
            "is missing, and there is no token .UNK.",
        ),
        (embedder, {KEY + "seperator_token_id": 300}, "300 is outside the vocabulary of 300"),
        (unigram, {scores: None}, "scores is missing"),
        (unigram, {scores: [float("nan")] * 300}, "tokenizer.json cannot be used"),
        (unigram, {KEY + "unknown_token_id": 300}, "300 is outside the vocabulary of 300"),
        (unigram, {KEY + "precompiled_charsmap": table[:2000]}, "charsmap is malformed"),
        (unigram, {KEY + "precompiled_charsmap": table[:-2]}, "charsmap is malformed"),
        (unigram, {KEY + "precompiled_charsmap": outside}, "charsmap is malformed"),
        (unigram, {KEY + "precompiled_charsmap": leaf}, "charsmap is malformed"),
        (unigram, {KEY + "add_space_prefix": False}, "add_space_prefix is false: expected true"),
        (scorer, {}, "the head that scores is incomplete, as in files of BERT's cross-encoders"),
        (scorer, {"left_out": (f"bert.{TYPES}", TYPES)}, "that of DistilBERT"),
        (several, {}, "num_labels gives 3 labels"),
    ]
    for folder, changes, says in cases:
        with subtests.test(says, changes=[*changes]):
            path = write_encoder_gguf(folder, tmp_path / "m.gguf", **changes)
            with pytest.raises(CheckpointError, match=says) as caught:
                load_model(EngineConfig(str(path)), lambda *_: None)
            assert str(path) in str(caught.value)
            assert "\n" not in str(caught.value)
