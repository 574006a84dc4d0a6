"""Bitwise invariance of the native kernels: a token's logits depend only on the text before it.
Other rows, chunk borders, the number of threads and the origin of the keys do not matter."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.paged_runner import PagedRunner
from builders.tiny_models import ARCHITECTURES, in_tiers, write_tiny
from builders.write_gguf import write_gguf
from torch import Tensor

from pdserve.engine.api import EngineConfig
from pdserve.engine.load import load_model
from pdserve.engine.models import MixtureOfExperts, NativeDecoder

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LENGTH = 150  # exceeds two tiles of 64 keys, and a window
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
LATENT_SIZES = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
FORMATS = dict.fromkeys(ARCHITECTURES, "Q8_0") | {
    "llama": "Q4_1",
    "qwen3": "Q4_0",
    "mistral": "F16",
    "gemma3": "Q5_1",
    "phi": "Q4_0",
    "olmo2": "Q5_1",
    "mixtral": "Q4_1",
    "qwen3_moe": "Q4_0",
}


@pytest.fixture(
    scope="module",
    params=in_tiers(
        (
            *ARCHITECTURES,
            *("llama-bf16", "phi-bf16", "gemma3-float32", "qwen3-int8", "qwen2_moe-bf16"),
            *("deepseek_v3-bf16", "gpt_oss-bf16", "gpt_oss-mxfp4", "deepseek_v2-int8"),
        )
    ),
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Return a tiny model of each architecture, in a different format for each."""
    arch, _, dtype = request.param.partition("-")
    format = FORMATS[arch]
    if dtype == "mxfp4":  # weights in GGUF
        format, dtype = "MXFP4", ""
    if dtype == "int8":  # keys and values
        path = write_tiny(tmp_path_factory.mktemp(request.param), arch)
        return EngineConfig(model=str(path), kernels="native", kv_dtype="int8")
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {} if dtype else SIZES  # odd sizes unless blocks need multiples of 32
    own = {"query_pre_attn_scalar": 32} if arch in ("gemma2", "gemma3") and not dtype else {}
    if arch.endswith("_moe") and not dtype:
        own = {"moe_intermediate_size": 32}
    if arch in LATENT and not dtype:
        own = {"moe_intermediate_size": 32, **LATENT_SIZES}
    if arch == "qwen2_moe" and not dtype:
        own |= {"shared_expert_intermediate_size": 64}
    path = write_tiny(folder / "hf", arch, **sizes, **own)
    if dtype:
        kv_dtype = "auto" if dtype == "bf16" else "float32"
        return EngineConfig(model=str(path), weights=dtype, kernels="native", kv_dtype=kv_dtype)
    scores = {"deepseek2.expert_gating_func": 2} if arch == "glm4_moe_lite" else {}
    gguf = write_gguf(path, folder / "m.gguf", format, **scores)
    return EngineConfig(model=str(gguf), kernels="native")


def decoder_of(config: EngineConfig, threads: int) -> NativeDecoder:
    decoder = load_model(replace(config, threads=threads), lambda what, fraction: None).decoder
    assert isinstance(decoder, NativeDecoder)
    return decoder


@pytest.fixture(scope="module")
def decoder(model: EngineConfig) -> NativeDecoder:
    return decoder_of(model, threads=1)


def text(seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def in_pieces(runner: PagedRunner, ids: Sequence[int], size: int) -> Tensor:
    """Return the logits of every token of one sequence, with `size` tokens per step."""
    parts = [runner.step({"x": ids[at : at + size]})["x"] for at in range(0, len(ids), size)]
    return torch.cat(parts)


@pytest.fixture(scope="module")
def one_by_one(decoder: NativeDecoder) -> Tensor:
    return in_pieces(PagedRunner(decoder), text(0), 1)


def test_invariant_under_chunks(
    subtests: pytest.Subtests, decoder: NativeDecoder, one_by_one: Tensor
) -> None:
    for size in (2, 7, 63, 64, 100, LENGTH):
        with subtests.test(size=size):
            assert torch.equal(in_pieces(PagedRunner(decoder), text(0), size), one_by_one)


def test_invariant_under_block_size(
    subtests: pytest.Subtests, decoder: NativeDecoder, one_by_one: Tensor
) -> None:
    for block_size in (32, 64):
        with subtests.test(block_size=block_size):
            runner = PagedRunner(decoder, block_size=block_size)
            assert torch.equal(in_pieces(runner, text(0), 33), one_by_one)


def test_invariant_under_threads(model: EngineConfig, one_by_one: Tensor) -> None:
    for threads in (2, 3):
        runner = PagedRunner(decoder_of(model, threads))
        assert torch.equal(in_pieces(runner, text(0), 50), one_by_one)
        assert torch.equal(in_pieces(PagedRunner(runner.decoder), text(0), 1), one_by_one)


def test_invariant_under_other_rows(decoder: NativeDecoder, one_by_one: Tensor) -> None:
    """The sequence runs among 31 others, some in decode and some in chunks."""
    runner, draw = PagedRunner(decoder, num_blocks=400), random.Random(1)
    others = {f"o{i}": text(100 + i) for i in range(31)}
    done = dict.fromkeys([*others, "x"], 0)
    logits = []
    widest = 0
    while done["x"] < LENGTH:
        step: dict[str, Sequence[int]] = {}
        for name, ids in (others | {"x": text(0)}).items():
            count = draw.choice((1, 1, 1, 5, 20)) if done[name] else 3
            part = ids[done[name] : done[name] + count]
            if part:
                step[name] = part
                done[name] += len(part)
        widest = max(widest, len(step))
        logits.append(runner.step(step)["x"])
    assert widest == 32
    assert runner.mixed_steps > 3
    assert torch.equal(torch.cat(logits), one_by_one)


@pytest.mark.parametrize("contexts", [(1, 100), pytest.param((8000,), marks=pytest.mark.extended)])
def test_invariant_under_shares(
    subtests: pytest.Subtests, model: EngineConfig, one_by_one: Tensor, contexts: Sequence[int]
) -> None:
    """Threads take rows with similar contexts through all layers separately; other rows are
    computed by all threads together."""
    shares_change_nothing(subtests, model, one_by_one, contexts)


@pytest.mark.parametrize("model", ["llama", "gemma2", "mixtral"], indirect=True)
def test_invariant_under_shares_beside_a_long_context(
    subtests: pytest.Subtests, model: EngineConfig, one_by_one: Tensor
) -> None:
    """Covers full attention alone, windows and experts."""
    shares_change_nothing(subtests, model, one_by_one, (8000,))


def shares_change_nothing(
    subtests: pytest.Subtests, model: EngineConfig, one_by_one: Tensor, contexts: Sequence[int]
) -> None:
    decoder = decoder_of(model, threads=2)
    layers = decoder.config.layers
    full = sum(not layer.window for layer in layers)  # windows make rows similar
    table = decoder.config.positions
    limit = table.num_positions - LENGTH if table else max(contexts)
    for longest in {min(longest, limit) for longest in contexts}:
        with subtests.test(longest=longest):
            runner = PagedRunner(decoder, num_blocks=700)
            sequences = {"x": text(0)} | {f"o{i:02}": text(100 + i) for i in range(30)}
            sequences["long"] = text(1, longest + LENGTH)
            begin = dict.fromkeys(sequences, 1) | {"long": longest}
            prompts = {name: ids[: begin[name]] for name, ids in sequences.items()}
            runner.step(prompts, kv_only=True)
            shares = set()
            for n in range(40):
                step = {name: ids[begin[name] + n :][:1] for name, ids in sequences.items()}
                assert torch.equal(runner.step(step)["x"], one_by_one[1 + n : 2 + n])
                shares.add(decoder.shares)
            unlike = longest == 8000 and full > len(layers) / 3
            # Experts need all rows at once.
            unlike |= any(isinstance(layer.feed_forward, MixtureOfExperts) for layer in layers)
            assert shares == ({0} if unlike else {2})


def test_every_instruction_set_of_the_machine_agrees(
    model: EngineConfig, one_by_one: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of bf16 weights are rounded by an instruction of the machine; everything else is
    equal."""
    monkeypatch.setenv("PDSERVE_NATIVE_ISA", "generic")
    decoder = decoder_of(model, threads=2)
    assert decoder.numerics.endswith("generic")
    logits = in_pieces(PagedRunner(decoder), text(0), 75)
    if model.weights == "bf16":
        torch.testing.assert_close(logits, one_by_one, atol=0.05, rtol=0)
    else:
        assert torch.equal(logits, one_by_one)
