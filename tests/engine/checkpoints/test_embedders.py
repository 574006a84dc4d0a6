"""Detection of an embedding model from its files, and errors for unsupported ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, of, run
from builders.tiny_embedder import MODES, Oracle, write_embedder, write_modules, write_pooling
from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf
from fakes import hub as fake_hub

from pdserve.engine.api import EngineConfig, Pooled, Request
from pdserve.engine.build import build_engine
from pdserve.engine.checkpoints import CardData, CheckpointError, HubModel
from pdserve.engine.checkpoints.resolve import download
from pdserve.engine.load import load_model, open_checkpoint

PROMPT = (5, 80, 200, 31)
EXACT: dict[str, Any] = {"weights": "float32", "kernels": "reference", "kv_tokens": 1024}
WITHOUT_HEAD = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2")


def load(path: Path, **options: Any) -> tuple[CardData, torch.Tensor]:
    """Return the card, and the pooled state of a prompt."""
    engine, card = build_engine(EngineConfig(model=str(path), **EXACT, **options))
    params = ask("a", PROMPT).params
    (event,) = of(run(engine, Request("a", PROMPT, params, 0, pool=True)), Pooled)
    return card, torch.tensor(event.values)


def refused(path: Path, says: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_model(EngineConfig(model=str(path), **EXACT, **options), lambda *_: None)


@pytest.fixture
def embedder(tmp_path: Path) -> Path:
    return write_embedder(tmp_path / "m")


@pytest.mark.parametrize("arch", WITHOUT_HEAD)
def test_models_without_a_head(arch: str, tmp_path: Path) -> None:
    mode, kind = ("mean_tokens", "mean") if arch in ("llama", "gemma2") else ("lasttoken", "last")
    path = write_embedder(tmp_path / "m", arch, mode)
    names = open_checkpoint(path).names()
    assert "embed_tokens.weight" in names
    assert not any(name.startswith(("model.", "lm_head")) for name in names)
    card, got = load(path)
    assert (card.pooling, card.normalizes, card.hidden_size) == (kind, True, len(got))
    assert card.architecture.endswith("Model")
    assert torch.allclose(got, Oracle(path, kind).pooled(PROMPT), atol=1e-4, rtol=1e-4)


def test_a_stored_head_is_not_loaded(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "m", "phi", headless=False)  # its head also has a bias
    assert {"lm_head.weight", "lm_head.bias"} <= set(open_checkpoint(path).names())
    card, got = load(path)
    assert card.pooling == "last"
    assert torch.allclose(got, Oracle(path, "last").pooled(PROMPT), atol=1e-4, rtol=1e-4)


def test_the_digest_covers_only_what_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest does not depend on whether the files were served for another task before."""
    path = write_tiny(tmp_path / "m", "qwen3")
    digests = []
    for name, tasks in (("one", ["generate", "embed", "embed"]), ("two", ["embed", "generate"])):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        for task in tasks:
            config = EngineConfig(model=str(path), task=task, **EXACT)
            card = load_model(config, lambda *_: None).card
            digests.append((task, card.weights_digest))
    assert len(set(digests)) == 2
    assert len({digest for _, digest in digests}) == 2


def test_without_a_normalize_module(tmp_path: Path) -> None:
    card, _ = load(write_embedder(tmp_path / "m", normalizes=False))
    assert not card.normalizes


def test_the_longest_text_is_as_long_as_the_context(embedder: Path) -> None:
    for length, kind in ((100, "xlm-roberta"), (90, "roberta"), (80, "bert")):
        settings = json.dumps({"max_seq_length": length})
        (embedder / f"sentence_{kind}_config.json").write_text(settings)
        card, _ = load(embedder)
        assert card.context_len == length


def test_a_model_without_a_head_is_an_embedding_model(embedder: Path) -> None:
    (embedder / "modules.json").unlink()
    card, _ = load(embedder)
    assert (card.pooling, card.normalizes) == ("last", True)
    refused(embedder, "--task generate: the model has no output head", task="generate")


def test_options_override_the_files(embedder: Path) -> None:
    card, got = load(embedder, pooling="mean")
    assert card.pooling == "mean"
    assert torch.allclose(got, Oracle(embedder, "mean").pooled(PROMPT), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="--pooling mean contradicts --task generate"):
        load(embedder, pooling="mean", task="generate")


def test_the_pooling_option_changes_nothing_else(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "m", normalizes=False)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    card, _ = load(path, pooling="mean")
    assert (card.pooling, card.normalizes, card.context_len) == ("mean", False, 100)


def test_an_option_can_replace_unsupported_pooling(
    embedder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pooling(embedder, "max_tokens")
    card, _ = load(embedder, pooling="mean")
    assert "--pooling mean replaces the model's pooling settings" in caplog.text
    assert (card.pooling, card.normalizes) == ("mean", True)


def test_an_embedding_model_with_a_head_can_generate(tmp_path: Path) -> None:
    path = write_embedder(tmp_path / "m", headless=False)
    options = EngineConfig(model=str(path), task="generate", **EXACT)
    engine, card = build_engine(options)
    assert card.pooling == ""
    assert run(engine, ask("a", PROMPT))


def test_pooling_is_part_of_the_config_digest(embedder: Path) -> None:
    digests = {load(embedder, pooling=kind)[0].config_digest for kind in ("last", "mean")}
    assert len(digests) == 2


@pytest.mark.parametrize("mode", sorted({*MODES} - {"lasttoken", "mean_tokens", "cls_token"}))
def test_an_unsupported_pooling_mode_is_named_in_the_error(embedder: Path, mode: str) -> None:
    write_pooling(embedder, mode)
    supported = "lasttoken, mean_tokens, cls_token"
    refused(embedder, f"pooling mode {mode} is not supported .supported: {supported}")


def test_the_first_token_of_a_decoder_is_no_embedding(embedder: Path) -> None:
    write_pooling(embedder, "cls_token")
    refused(embedder, "pooling cls needs an encoder")
    refused(embedder, "pooling cls needs an encoder", pooling="cls")


def test_no_pooling_mode_and_several_are_refused(embedder: Path) -> None:
    write_pooling(embedder)
    refused(embedder, "pooling mode none is not supported")
    write_pooling(embedder, "lasttoken", "mean_tokens")
    refused(embedder, "pooling mode lasttoken, mean_tokens is not supported")


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (("Dense", "Normalize"), "Transformer, Pooling, Dense, Normalize: only Transformer"),
        (("Normalize", "Normalize"), "only Transformer, Pooling and Normalize"),
    ],
)
def test_an_unsupported_module_is_named_in_the_error(
    embedder: Path, modules: tuple[str, ...], says: str
) -> None:
    write_modules(embedder, *modules)
    refused(embedder, says)


def test_malformed_modules_are_refused(subtests: pytest.Subtests, embedder: Path) -> None:
    for text, says in (
        ("{}", "is not a list of JSON objects"),
        ("[5]", "is not a list of JSON objects"),
        ('[{"type": 5}]', "is not a list of modules"),
        ('[{"type": "a.Transformer", "path": "../x"}]', "not a direct subfolder"),
        ('[{"type": "a.Transformer", "path": "/etc"}]', "not a direct subfolder"),
        ('[{"type": "a.Transformer", "path": ""}]', "the modules Transformer: only"),
        ("[]", "the modules none: only"),
        (
            '[{"type": "a.Transformer", "path": "0_T"}, {"type": "a.Pooling", "path": "1_P"}]',
            "a model in a subfolder is not supported: '0_T'",
        ),
    ):
        with subtests.test(text=text, says=says):
            (embedder / "modules.json").write_text(text)
            refused(embedder, says)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_seq_length": 0}, "max_seq_length is 0"),
        ({"max_seq_length": "512"}, "max_seq_length is '512'"),
        ({"do_lower_case": True}, "do_lower_case is not supported"),
    ],
)
def test_unsupported_text_settings_are_refused(
    embedder: Path, config: dict[str, Any], says: str
) -> None:
    (embedder / "sentence_bert_config.json").write_text(json.dumps(config))
    refused(embedder, says)


@pytest.mark.parametrize(
    "field", [{"is_causal": False}, {"use_bidirectional_attention": True}], ids=str
)
def test_noncausal_attention_is_refused(embedder: Path, field: dict[str, bool]) -> None:
    config = json.loads((embedder / "config.json").read_text())
    (embedder / "config.json").write_text(json.dumps(config | field))
    refused(embedder, "attention must be causal")


def test_an_unsupported_class_is_named_in_the_error(
    subtests: pytest.Subtests, embedder: Path
) -> None:
    for name in ("T5EncoderModel", "Model", "TextModel", "Qwen3ForTokenClassification"):
        with subtests.test(name):
            config = json.loads((embedder / "config.json").read_text())
            (embedder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
            refused(embedder, rf"unknown architecture \({name}\)")


def test_the_modules_of_a_hub_model_are_fetched(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("onnx", "2_Dense", "1_Pooling/inner"):
        (embedder / other).mkdir()
        (embedder / other / "config.json").write_text("{}")
        (embedder / other / "model.safetensors").write_bytes(b"x")
    with fake_hub.serve({"org/embedder": embedder}) as (endpoint, _):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        path = download(HubModel("org/embedder"), lambda *_: None, tmp_path / "cache")
        got = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors"} <= got
    assert not [name for name in got if name.startswith("onnx") or "inner" in name]
    assert "2_Dense/model.safetensors" not in got
    card, _ = load(path)
    assert card.pooling == "last"


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (3, "last")])
def test_gguf_metadata_give_pooling_and_the_final_eos(
    tmp_path: Path, number: int, kind: str
) -> None:
    source = write_tiny(tmp_path / "hf", "qwen3")
    metadata = {"qwen3.pooling_type": number, "tokenizer.ggml.add_eos_token": True}
    path = write_gguf(source, tmp_path / "m.gguf", **metadata)
    card, got = load(path)
    assert (card.pooling, card.normalizes) == (kind, True)
    assert torch.allclose(got, Oracle(source, kind).pooled(PROMPT), atol=1e-4, rtol=1e-4)
    processor = json.loads(card.tokenizer_json)["post_processor"]
    assert [list(part) for part in processor["single"]][-1] == ["SpecialToken"]
    plain = write_gguf(source, tmp_path / "p.gguf", **{"tokenizer.ggml.add_eos_token": True})
    generates = load_model(EngineConfig(model=str(plain), **EXACT), lambda *_: None).card
    assert generates.pooling == ""
    single = (json.loads(generates.tokenizer_json)["post_processor"] or {}).get("single", [])
    assert "SpecialToken" not in [name for part in single[1:] for name in part]


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (2, "pooling cls needs an encoder"),
        (4, "qwen3.pooling_type is rank: only mean, cls and last are supported"),
        (9, "qwen3.pooling_type is 9: only mean, cls and last are supported"),
    ],
)
def test_an_unsupported_gguf_pooling_is_named_in_the_error(
    tmp_path: Path, number: int, says: str
) -> None:
    source = write_tiny(tmp_path / "hf", "qwen3")
    path = write_gguf(source, tmp_path / "m.gguf", **{"qwen3.pooling_type": number})
    refused(path, says)


def test_a_reranker_has_two_score_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = write_tiny(tmp_path / "m", "qwen3", vocab_size=300)
    refused(path, "--task score: the vocabulary must have the tokens 'yes' and 'no'", task="score")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path / "tokenizer.json"))
    engine, card = build_engine(EngineConfig(model=str(path), task="score", **EXACT))
    assert card.score_ids == (259, 260)
    assert card.pooling == ""
    assert run(engine, ask("a", PROMPT)), "scores come from a generated token"
