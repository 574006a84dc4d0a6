"""The decoder on the CUDA kernels, interpreted: it equals the reference, and a token does not
depend on other rows or on chunk borders."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from builders.paged_runner import PagedRunner, load_decoder
from builders.tiny_models import ARCHITECTURES, write_tiny
from fakes import triton_interpreter as _  # noqa: F401  (before kernels run)
from torch import Tensor

from pdserve.engine.models.cuda import weights
from pdserve.kernels.cuda.linear import SplitSums, packing, product, split_linear, tiles

pytestmark = pytest.mark.kernels

LATENT = {"qk_rope_head_dim": 16, "kv_lora_rank": 32, "head_dim": 16}  # 48 values per token


def sizes(arch: str) -> dict[str, Any]:
    """Return sizes that the kernels accept: heads of a multiple of 16 values."""
    if arch in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"):
        return LATENT
    return {
        "stablelm": {},
        "gpt2": {"hidden_size": 48},
        "mistral": {"sliding_window": 9, "head_dim": 16},
    }.get(arch, {"head_dim": 16})


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, sizes(arch)) for arch in ARCHITECTURES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "qwen3-dim-80": ("qwen3", {"head_dim": 80, "tie_word_embeddings": True}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True, "head_dim": 16}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "deepseek_v2-q-rank": (
        "deepseek_v2",
        {"q_lora_rank": 20, "topk_method": "greedy", **LATENT},
    ),
}
# Architectures with caps and windows; sinks, biases and experts; latent attention and groups of
# experts.
FEW = ("gemma2", "gpt_oss", "deepseek_v3")


def few_always(names: Iterable[str]) -> list[Any]:
    """Return parameters of which `make test-kernels` runs only `FEW`; each takes up to 40 s."""
    rest = pytest.mark.extended
    return [pytest.param(name, marks=[] if name in FEW else rest) for name in names]


# Tokens per step of two sequences: chunks, decode rows next to chunks, decode rows.
SCHEDULE = ({"a": 5}, {"a": 1, "b": 14}, {"a": 8, "b": 1}, {"a": 1, "b": 1})


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split rows of a few columns, too, so that the kernel after a product adds its splits."""
    monkeypatch.setattr(tiles, "SPLIT_COLUMNS", 16)
    monkeypatch.setattr(packing, "PLAIN_BLOCK", 16)
    monkeypatch.setattr(product, "PLAIN_COLUMNS", tl.constexpr(16))
    sums = 0

    def counted(x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor | SplitSums:
        nonlocal sums
        found = split_linear(x, matrix, bias)
        sums += isinstance(found, SplitSums)
        return found

    monkeypatch.setattr(weights, "split_linear", counted)
    yield
    assert sums


def tokens_of(name: str, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(259, (count,), generator=generator).tolist()


def run(runner: PagedRunner, schedule: tuple[dict[str, int], ...]) -> dict[str, Tensor]:
    """Return the logits of every token, with teacher forcing."""
    parts: dict[str, list[Tensor]] = {}
    for step in schedule:
        given = {}
        for name, count in step.items():
            done = runner.lens.get(name, 0)
            given[name] = tokens_of(name, done + count)[done:]
        for name, logits in runner.step(given).items():
            parts.setdefault(name, []).append(logits)
    return {name: torch.cat(logits) for name, logits in parts.items()}


@pytest.mark.parametrize("variant", few_always(VARIANTS))
def test_logits_equal_the_reference(variant: str, tmp_path: Path) -> None:
    arch, overrides = VARIANTS[variant]
    path = write_tiny(tmp_path, arch, seed=3, **overrides)
    runner = PagedRunner(load_decoder(path, kernels="cuda"), block_size=16)
    actual = run(runner, SCHEDULE)
    expected = run(PagedRunner(load_decoder(path), block_size=16), SCHEDULE)
    for name, logits in actual.items():
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected[name], atol=1e-4, rtol=0)
        assert logits.std() > 0.3, "the logits are too flat to compare"
    assert runner.mixed_steps == 2
    windows = {layer.window for layer in runner.decoder.config.layers} - {0}
    assert all(window < 15 for window in windows)


@pytest.mark.parametrize("arch", few_always(ARCHITECTURES))
def test_a_token_does_not_depend_on_other_rows_or_chunks(arch: str, tmp_path: Path) -> None:
    """Compares, in bfloat16, a sequence computed token by token, in chunks, and next to others."""
    decoder = load_decoder(
        write_tiny(tmp_path, arch, seed=5, **sizes(arch)), torch.bfloat16, kernels="cuda"
    )
    alone = run(PagedRunner(decoder), ({"a": 1},) * 14)["a"]
    chunks = run(PagedRunner(decoder), ({"a": 6}, {"a": 7}, {"a": 1}))["a"]
    beside = run(
        PagedRunner(decoder),
        ({"b": 9}, {"a": 2, "b": 1}, {"a": 11, "c": 3, "b": 1}, {"a": 1, "b": 1, "c": 2}),
    )["a"]
    assert torch.equal(alone, chunks)
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2"])
def test_kv_only_writes_the_same_keys_and_values(arch: str, tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny(tmp_path, arch, **sizes(arch)), kernels="cuda")
    tokens = tokens_of("a", 11)
    runners = [PagedRunner(decoder), PagedRunner(decoder)]
    assert runners[0].step({"x": tokens})["x"].shape == (11, 259)
    assert runners[1].step({"x": tokens}, kv_only=True)["x"].shape == (0, 259)
    for n in range(decoder.config.num_layers):
        caches = [runner.kv.values(n) for runner in runners]
        assert torch.equal(caches[0].nan_to_num(0), caches[1].nan_to_num(0))
        assert caches[0].isfinite().any()
