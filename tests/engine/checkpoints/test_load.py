"""load_model: the decoder gets every tensor, the card describes what was loaded, and errors name
their cause.

The file is long because each test makes and loads a small checkpoint with the same helpers.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.paged_runner import PagedRunner, load_decoder
from builders.tiny_models import shipped_model, write_tiny
from builders.write_gguf import write_gguf
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pdserve.engine.api import EngineConfig
from pdserve.engine.checkpoints import CheckpointError, DigestCache, TextCache, WeightLoader
from pdserve.engine.checkpoints.gguf import GgufCheckpoint
from pdserve.engine.checkpoints.hf import DirectoryCheckpoint
from pdserve.engine.checkpoints.weight_loader import leaf, merkle_root
from pdserve.engine.load import LoadedModel, load_model, open_checkpoint
from pdserve.engine.models import NativeDecoder
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.weights import VALUES, RawTensor
from pdserve.engine.weights.convert import unpack

QUANTIZABLE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the digest folder in a cache that only this test uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve" / "digests"


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), **options), lambda what, fraction: None)


def loaded_tensors(path: Path, format: str | None, threads: int = 2) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    shapes = {name: checkpoint.layout(name).shape for name in checkpoint.names()}
    with WeightLoader(
        checkpoint, shapes, format, threads, False, True, lambda fraction: None
    ) as weights:
        # Read in an order that differs from that of loading.
        names = sorted(shapes, reverse=True)
        return {name: torch.from_numpy(unpack(weights(name))) for name in names}


def test_card_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_tiny(tmp_path / "Tiny-Llama", "llama")
    os.utime(folder / "model.safetensors", (1_700_000_000, 1_700_000_000))
    card = load(folder).card
    assert (card.name, card.architecture) == ("Tiny-Llama", "LlamaForCausalLM")
    assert (card.context_len, card.vocab_size, card.quantization) == (512, 259, "float32")
    assert (card.eos_ids, card.bos_id, card.adds_bos) == ((258,), 256, True)
    assert card.created == 1_700_000_000
    assert card.weights_bytes == (folder / "model.safetensors").stat().st_size
    assert card.tokenizer_json == (folder / "tokenizer.json").read_bytes()
    assert card.generation_config["eos_token_id"] == [258]
    named = load(folder, served_name="mine", context_len=99).card
    assert (named.name, named.context_len) == ("mine", 99)
    caplog.clear()
    assert load(folder, context_len=10**6).card.context_len == 512
    assert "--context-len 1000000 exceeds the model's maximum" in caplog.text


def test_end_ids_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    extra = {**tokenizer["added_tokens"][-1], "id": 259, "content": "<|extra|>"}
    tokenizer["added_tokens"].append(extra)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    assert open_checkpoint(folder).text_files().eos_ids == (258, 259)
    assert load(folder).card.eos_ids == (258,)


def test_end_ids_of_the_text_model_count(tmp_path: Path) -> None:
    """A model with a vision tower states them in text_config."""
    folder = write_tiny(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] = {"eos_token_id": [258, 7]}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).text_files().eos_ids == (258, 7)


def test_gguf_metadata_of_wrong_type_or_value_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    prefix = "llama.rope.scaling."
    yarn: dict[str, Any] = {"type": "yarn", "factor": -1.0, "original_context_length": 8}
    yarn = {prefix + key: value for key, value in (yarn | {"attn_factor": 1.0}).items()}
    with pytest.raises(CheckpointError, match="malformed: math domain error"):
        open_checkpoint(write_gguf(folder, tmp_path / "yarn.gguf", **yarn))
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf"))
    assert isinstance(checkpoint, GgufCheckpoint)
    checkpoint.text_files()
    for change in ({"token_type": 5}, {"pre": array("i", [1])}, {"eos_token_id": ["a"]}):
        keys = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        checkpoint._metadata = checkpoint._metadata | keys
        with pytest.raises(CheckpointError, match="malformed"):
            checkpoint.text_files()


def test_the_shipped_model_is_the_default() -> None:
    seen: list[tuple[str, float]] = []
    config = EngineConfig(weights="quantized")  # loads fastest
    loaded = load_model(config, lambda what, fraction: seen.append((what, fraction)))
    assert (loaded.card.name, loaded.card.quantization) == ("SmolLM2-135M-Instruct", "Q4_1")
    assert loaded.card.weights_bytes == shipped_model().stat().st_size
    assert loaded.decoder.config.num_layers == 30
    assert seen[0] == ("reading the tokenizer", 0.0)
    assert seen[-1] == ("loading weights", 1.0)
    assert [f for _, f in seen] == sorted(f for _, f in seen)


def test_every_tensor_reaches_the_decoder(subtests: pytest.Subtests, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q8_0", rounded=tmp_path / "rounded")
    for format in ("F32", "BF16", "F16", None):
        with subtests.test(format=format):
            got = loaded_tensors(gguf, format)
            expected = load_file(tmp_path / "rounded" / "model.safetensors")
            assert set(got) == set(expected)
            for name, values in expected.items():
                if values.dim() > 1 and format in ("BF16", "F16"):
                    values = (values.bfloat16() if format == "BF16" else values.half()).float()
                assert torch.equal(got[name], values), name


def test_large_tensors_are_expanded_in_row_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    whole = loaded_tensors(gguf, "F32")
    calls: list[int] = []
    real = WeightLoader._convert

    def counted(self: WeightLoader, *args: Any) -> None:
        calls.append(threading.get_ident())
        real(self, *args)

    monkeypatch.setattr("pdserve.engine.checkpoints.weight_loader.PIECE_VALUES", 640)  # ten rows
    monkeypatch.setattr(WeightLoader, "_convert", counted)
    pieces = loaded_tensors(gguf, "F32", threads=3)
    assert len(calls) > 2 * len(whole)
    assert all(torch.equal(pieces[name], whole[name]) for name in whole)


def test_expansion_is_logged_with_its_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE, vocab_size=30_000)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    load(gguf, weights="bf16")
    assert "weights expanded to BF16: 8 MB" in caplog.text
    caplog.clear()
    load(gguf, weights="quantized")
    assert "expanded" not in caplog.text


def test_dtype_of_the_decoder(subtests: pytest.Subtests, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q4_0")
    for weights, dtype in (
        ("auto", torch.float32),
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("quantized", torch.float32),
    ):
        with subtests.test(weights):
            decoder = load(gguf, weights=weights, kernels="reference").decoder
            assert isinstance(decoder, Decoder)
            assert decoder.dtype == dtype
            assert decoder.kv_groups[0].dtype == str(dtype).removeprefix("torch.")
            half = load(gguf, weights=weights, kv_dtype="bf16", kernels="reference").decoder
            assert half.kv_groups[0].dtype == "bfloat16"


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_a_model_loads_in_inference_mode(kernels: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q4_0")
    with torch.inference_mode():
        loaded = load(gguf, weights="bf16", kernels=kernels)
    assert loaded.card.weights_digest == load(gguf).card.weights_digest


@pytest.mark.parametrize("kind", ["IQ2_XS", "IQ1_S", "TQ1_0", "MXFP4"])
def test_low_bit_types_are_not_expanded(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
    folder = write_tiny(tmp_path / "hf", "llama", num_attention_heads=4, **sizes)
    gguf = write_gguf(folder, tmp_path / "m.gguf", kind)
    ids = list(range(3, 60))
    found = PagedRunner(load(gguf, kv_dtype="float32").decoder).step({"x": ids})["x"]
    exact = PagedRunner(load_decoder(gguf)).step({"x": ids})["x"]
    assert "kept as float32" not in caplog.text
    assert torch.corrcoef(torch.stack((found.flatten(), exact.flatten())))[0, 1] > 0.99
    assert exact.std() > 0.01, "the logits are too flat to compare"


def test_kernels_of_the_decoder(subtests: pytest.Subtests, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    gguf = write_gguf(folder, tmp_path / "m.gguf", "Q4_0")
    for options, native in (
        ({}, True),
        ({"weights": "bf16"}, True),
        ({"weights": "float32"}, False),  # float32 is for comparisons
        ({"weights": "float32", "kernels": "native"}, True),
        ({"kernels": "reference"}, False),
        ({"block_size": 24}, False),
    ):
        with subtests.test(**options):
            decoder = load(gguf, **options).decoder
            assert isinstance(decoder, NativeDecoder) == native
            assert decoder.kv_groups[0].keys_by_dim == native
            assert decoder.kv_groups[0].dtype == ("float16" if native else "float32")


def test_int8_keys_without_the_native_kernels_are_refused(subtests: pytest.Subtests) -> None:
    for options in ({"weights": "float32"}, {"kernels": "reference"}, {"block_size": 24}):
        with (
            subtests.test(options=options),
            pytest.raises(ValueError, match="--kv-dtype int8 needs the native kernels"),
        ):
            load(Path("nowhere"), kv_dtype="int8", **options)


def test_an_instruction_set_by_name(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    assert load(folder, native_isa="generic").decoder.numerics.endswith("/generic")
    with pytest.raises(ValueError, match=r"no kernels for 'sse9'; it has .*generic"):
        load(folder, native_isa="sse9")


@pytest.mark.parametrize("options", [{"block_size": 24}, {"device": "cuda"}])
def test_unavailable_native_kernels_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--kernels native contradicts --(block-size|device)"):
        load(Path("nowhere"), kernels="native", **options)


def edit(folder: Path, add: dict[str, torch.Tensor], drop: set[str]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if name not in drop} | add
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "new")
    (folder / "new").replace(file)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    norm = "model.layers.1.input_layernorm.weight"
    edit(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(72)}, {norm})
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"missing 1 tensors: {norm}" in str(caught.value)
    assert "unexpected 1 tensors: model.layers.0.self_attn.q_proj.bias" in str(caught.value)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    edit(folder, {"model.norm.weight": torch.ones(47)}, set())
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight is \[47\]; the config says \[48\]"
    ):
        load(folder)


def test_a_copy_of_a_tied_head_and_old_buffers_are_accepted(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "qwen2")
    digest = load(folder).card.weights_digest
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}
    edit(folder, {"lm_head.weight": torch.zeros(259, 48), **buffer}, set())
    assert load(folder).card.weights_digest == digest


def test_an_unknown_architecture_is_named_in_the_error(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["XForCausalLM"]}))
    with pytest.raises(CheckpointError, match=r"unknown architecture .*LlamaForCausalLM"):
        load(folder)


def test_the_digest_depends_on_the_weights_and_not_on_the_files(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    digest = load(folder).card.weights_digest
    assert len(digest) == 64
    sharded = write_tiny(tmp_path / "sharded", "llama", max_shard_size="40KB")
    gguf = write_gguf(folder, tmp_path / "m.gguf")  # q and k have another row order
    for same in (sharded, gguf):
        assert load(same).card.weights_digest == digest
        assert load(same, weights="quantized").card.weights_digest == digest
    other = write_tiny(tmp_path / "other", "llama", seed=1)
    half = write_tiny(tmp_path / "half", "llama", dtype=torch.float16)
    found = {digest, load(other).card.weights_digest, load(half).card.weights_digest}
    assert len(found) == 3


def test_one_changed_bit_changes_the_digest(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    before = load(folder).card.weights_digest
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert load(folder).card.weights_digest != before


def test_the_digest_is_cached_until_the_file_changes(cache: Path, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    digest = load(folder).card.weights_digest
    entries = list(cache.iterdir())
    assert [entry.read_text() for entry in entries] == [digest]
    entries[0].write_text("ab" * 32)
    assert load(folder).card.weights_digest == "ab" * 32  # taken from the cache
    entries[0].write_text("not a digest")
    assert load(folder).card.weights_digest == digest
    copy = shutil.copytree(folder, tmp_path / "copy")
    entries[0].write_text("ab" * 32)
    assert load(copy).card.weights_digest == digest  # other files


def test_an_unwritable_cache_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remembered = DigestCache(tmp_path / "file" / "folder")
    remembered.put([__file__], "ab" * 32)
    assert remembered.get([__file__]) is None
    assert remembered.get([str(tmp_path / "gone")]) is None


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_tokenizer_is_cached_until_its_file_changes(
    kind: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    path = write_gguf(folder, tmp_path / "m.gguf") if kind == "gguf" else folder
    checkpoint = open_checkpoint(path)
    read: list[Path] = []
    real = type(checkpoint).text_files

    def counted(self: Any) -> Any:
        read.append(path)
        return real(self)

    monkeypatch.setattr(type(checkpoint), "text_files", counted)
    first = load(path).card
    again = load(path).card
    assert len(read) == 1
    assert again == first
    for damaged in (b"", b"{}", first.tokenizer_json):
        (entry,) = (cache.parent / "tokenizers").iterdir()
        entry.write_bytes(damaged)
        assert load(path).card == first
    assert len(read) == 4
    changed = path if kind == "gguf" else path / "tokenizer.json"
    os.utime(changed, ns=(1, 1))
    load(path)
    assert len(read) == 5


def test_a_cached_tokenizer_that_was_changed_is_read_again(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama")
    checkpoint = open_checkpoint(folder)
    remembered, text = TextCache(tmp_path / "texts"), checkpoint.text_files()
    remembered.put(checkpoint.text_paths, text)
    assert remembered.get(checkpoint.text_paths) == text
    (entry,) = (tmp_path / "texts").iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"vocab", b"vocap"))
    assert remembered.get(checkpoint.text_paths) is None


@given(st.dictionaries(st.text(max_size=4), st.binary(min_size=1, max_size=4), max_size=9))
def test_the_merkle_root_equals_its_recursive_definition(contents: dict[str, bytes]) -> None:
    leaves = {name: hashlib.sha256(data).digest() for name, data in contents.items()}

    def root(level: list[bytes]) -> bytes:
        """Return the root by RFC 6962, 2.1: the left subtree is the largest power of two below the
        size."""
        if len(level) == 1:
            return level[0]
        split = 1 << (len(level) - 1).bit_length() - 1
        return hashlib.sha256(b"\1" + root(level[:split]) + root(level[split:])).digest()

    expected = (
        root([leaves[name] for name in sorted(leaves)]) if leaves else hashlib.sha256().digest()
    )
    assert merkle_root(leaves) == expected.hex()


def test_a_leaf_depends_on_name_format_shape_and_values() -> None:
    data = np.arange(6, dtype=np.float32)
    stored = {VALUES: data}
    leaves = {
        leaf("a", RawTensor(stored, "F32", (6,))),
        leaf("b", RawTensor(stored, "F32", (6,))),
        leaf("a", RawTensor({VALUES: data.reshape(2, 3)}, "F32", (2, 3))),
        leaf("a", RawTensor({VALUES: data.view(np.int32)}, "I32", (6,))),
        leaf("a", RawTensor({VALUES: data + 1}, "F32", (6,))),
        leaf("a", RawTensor({"x": data[:3], "y": data[3:]}, "F32", (6,))),
        leaf("a", RawTensor({"y": data[:3], "x": data[3:]}, "F32", (6,))),
    }
    assert len(leaves) == 7


def test_a_failed_load_raises_its_error_and_leaves_no_thread(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", dtype=torch.float16)
    checkpoint = open_checkpoint(folder)
    shapes = {name: checkpoint.layout(name).shape for name in checkpoint.names()}

    def broken(fraction: float) -> None:
        if fraction > 0.5:
            raise OSError("progress is broken")

    def load_all() -> None:
        with WeightLoader(checkpoint, shapes, "F32", 2, True, False, broken) as weights:
            for name in shapes:
                weights(name)

    with pytest.raises(OSError, match="progress is broken"):
        load_all()
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]


def test_quantized_and_expanded_weights_have_the_same_values(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "hf", "llama", **QUANTIZABLE)
    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "m.gguf", "Q5_0"))
    expanded = loaded_tensors(tmp_path / "m.gguf", "F32")
    for name, values in expanded.items():
        assert np.array_equal(unpack(checkpoint.tensor(name)), values.numpy())


def test_a_tensor_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numpy's error must not appear as a traceback."""
    path, name = write_tiny(tmp_path / "model", "llama"), "model.layers.1.mlp.up_proj.weight"
    whole = DirectoryCheckpoint.tensor

    def tensor(self: DirectoryCheckpoint, request: str) -> RawTensor:
        if request == name:
            raise ValueError("cannot reshape array of size 7")
        return whole(self, request)

    monkeypatch.setattr(DirectoryCheckpoint, "tensor", tensor)
    with pytest.raises(CheckpointError, match=f"^{path}: tensor {name}: cannot reshape"):
        load(path)
