"""Every architecture compared with transformers on tiny seeded models, through a paged cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from builders.paged_runner import PagedRunner, load_decoder
from builders.tiny_models import (
    ARCHITECTURES,
    MULTIMODAL,
    in_tiers,
    transformers_class,
    write_tiny,
)
from torch import Tensor

KERNELS = ("reference", "native")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-untruncated": {**YARN, "truncate": False, "beta_fast": 8.0, "beta_slow": 0.5},
    "yarn-given-factor": {**YARN, "attention_factor": 0.9},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + n / 8 for n in range(12)],
        "long_factor": [1.0 + n for n in range(12)],
    }
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{arch: (arch, {}) for arch in (*ARCHITECTURES, *MULTIMODAL)},
    "mistral3-tied": ("mistral3", {"tie_word_embeddings": True, "sliding_window": None}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-gelu": ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 6}),
    "llama-dim-24": ("llama", {"head_dim": 24}),
    "qwen3-dim-80": ("qwen3", {"head_dim": 80, "vocab_size": 1003}),
    "granite-dim-112": ("granite", {"head_dim": 112, "tie_word_embeddings": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "stablelm-head-norms": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "exaone4-no-window": (
        "exaone4",
        {"layer_types": ["full_attention"] * 3, "sliding_window": None},
    ),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 50.0,
            }
        },
    ),
    "olmo3-yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, **YARN},
                "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"},
            }
        },
    ),
    "gpt_neox-in-turn": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "apertus-biases": ("apertus", {"attention_bias": True, "rope_parameters": None}),
    "gpt2-untied": (
        "gpt2",
        {"tie_word_embeddings": False, "n_inner": None, "scale_attn_weights": False},
    ),
    "phi-tied": ("phi", {"tie_word_embeddings": True}),
    "phi3-no-window": ("phi3", {"sliding_window": None}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "gemma3-soft-cap": ("gemma3", {"final_logit_softcapping": 2.0, "attention_bias": True}),
    "phi3-longrope": ("phi3", LONGROPE | {"original_max_position_embeddings": 16}),
    "phi3-longrope-short": ("phi3", LONGROPE | {"original_max_position_embeddings": 512}),
    "qwen3_moe-some-dense": ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "qwen3_moe-not-normed": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 5}),
    "qwen3_moe-windows": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
    ),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "glm4_moe-no-groups": ("glm4_moe", {"n_group": 1, "use_qk_norm": False}),
    "glm4_moe-not-normed": ("glm4_moe", {"norm_topk_prob": False, "topk_group": 2}),
    "deepseek_v2-q-rank": (
        "deepseek_v2",
        {"q_lora_rank": 20, "topk_method": "greedy", "num_attention_heads": 4},
    ),
    "deepseek_v2-yarn": ("deepseek_v2", {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": {**DEEPSEEK_YARN, "mscale": 0.7}}),
    "deepseek_v3-dense": (
        "deepseek_v3",
        {"q_lora_rank": None, "first_k_dense_replace": 3, "rope_interleave": False},
    ),
    "glm4_moe_lite-layers": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "tie_word_embeddings": True},
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 11, "hidden_act": "gelu"}),
    "gemma3-window-1": ("gemma3", {"sliding_window": 1}),
    **{
        f"llama-{name}": ("llama", {"rope_parameters": {"rope_theta": 5e4, **rope}})
        for name, rope in ROPES.items()
    },
    "gemma3-linear": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            }
        },
    ),
}
# Tokens per step of the sequences a, b and c: odd chunk borders, and decode rows among chunks.
SCHEDULE = (
    {"a": 7},
    {"a": 16, "b": 3},
    {"a": 1, "b": 10, "c": 33},
    {"a": 1, "b": 1, "c": 1},
    {"a": 13, "b": 1, "c": 1},
    {"a": 1, "b": 1},
    {"a": 1, "b": 2, "c": 9},
    *({"a": 1, "b": 1, "c": 1},) * 7,
)
LENS = {name: sum(step.get(name, 0) for step in SCHEDULE) for name in "abc"}


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model_class = transformers_class(path)
    return model_class.from_pretrained(path, attn_implementation="eager", dtype=dtype).eval()


def sequences(vocab: int = 259, seed: int = 1) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(vocab, (length,), generator=generator).tolist()
        for name, length in LENS.items()
    }


def run_schedule(runner: PagedRunner, ids: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the logits of every token, with teacher forcing."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ids}
    for step in SCHEDULE:
        tokens = {}
        for name, count in step.items():
            done = runner.lens.get(name, 0)
            tokens[name] = ids[name][done : done + count]
        for name, logits in runner.step(tokens).items():
            parts[name].append(logits)
    return {name: torch.cat(logits) for name, logits in parts.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(subtests: pytest.Subtests, variant: str, tmp_path: Path) -> None:
    ids = sequences()
    arch, overrides = VARIANTS[variant]
    path = write_tiny(tmp_path, arch, seed=3, **overrides)
    model = reference(path)
    with torch.inference_mode():
        expected = {x: model(torch.tensor([tokens])).logits[0] for x, tokens in ids.items()}
    for kernels in KERNELS:
        with subtests.test(kernels=kernels):
            runner = PagedRunner(load_decoder(path, kernels=kernels))
            actual = run_schedule(runner, ids)
            for name, logits in expected.items():
                torch.testing.assert_close(actual[name], logits, atol=1e-4, rtol=0)
                assert logits.std() > 0.3, "the logits are too flat to compare"
            assert runner.mixed_steps >= 3
            windows = {layer.window for layer in runner.decoder.config.layers} - {0}
            assert (runner.freed_blocks > 0) == bool(windows)
            assert all(window < LENS["b"] for window in windows)


@pytest.mark.parametrize("arch", in_tiers(ARCHITECTURES))
def test_greedy_tokens_equal_transformers(
    subtests: pytest.Subtests, arch: str, tmp_path: Path
) -> None:
    path = write_tiny(tmp_path, arch, seed=4)
    prompt = sequences(seed=2)["b"]
    with torch.inference_mode():
        expected = reference(path).generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
    for kernels in KERNELS:
        with subtests.test(kernels):
            runner = PagedRunner(load_decoder(path, kernels=kernels))
            runner.step({"x": prompt[:-1]}, kv_only=True)
            tokens = prompt[-1:]
            for _ in range(24):
                tokens.append(int(runner.step({"x": tokens[-1:]})["x"].argmax()))
            assert tokens[1:] == expected.tolist()


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_bf16_is_as_close_to_float32_as_transformers_bf16(arch: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path, arch, seed=5, dtype=torch.bfloat16)
    ids = sequences()
    actual = run_schedule(PagedRunner(load_decoder(path, torch.bfloat16)), ids)
    exact, rounded = reference(path), reference(path, torch.bfloat16)
    errors = {"actual": 0.0, "expected": 0.0}
    for name, tokens in ids.items():
        with torch.inference_mode():
            truth = exact(torch.tensor([tokens])).logits[0]
            expected = rounded(torch.tensor([tokens])).logits[0].float()
        errors["actual"] += (actual[name] - truth).square().mean().item()
        errors["expected"] += (expected - truth).square().mean().item()
    assert 0 < errors["actual"] <= 1.1 * errors["expected"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_kv_only_writes_the_same_keys_and_values(arch: str, kernels: str, tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny(tmp_path, arch), kernels=kernels)
    tokens = sequences()["a"][:11]
    runners = [PagedRunner(decoder), PagedRunner(decoder)]
    whole = runners[0].step({"x": tokens})["x"]
    nothing = runners[1].step({"x": tokens}, kv_only=True)["x"]
    assert whole.shape == (11, 259)
    assert nothing.shape == (0, 259)
    for n in range(decoder.config.num_layers):
        caches = [runner.kv.values(n) for runner in runners]
        assert torch.equal(caches[0].nan_to_num(0), caches[1].nan_to_num(0))
        assert caches[0].isfinite().any()


def test_only_requested_tokens_get_logits_and_kv_may_have_another_dtype(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "qwen3")
    ids = sequences()
    exact = run_schedule(PagedRunner(load_decoder(path)), ids)
    rounded = run_schedule(PagedRunner(load_decoder(path, kv_dtype=torch.bfloat16)), ids)
    for name in ids:
        assert rounded[name].dtype == torch.float32
        error = (rounded[name] - exact[name]).abs().max().item()
        assert 1e-5 < error < 0.2
