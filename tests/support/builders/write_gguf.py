"""Writes GGUF files of Hugging Face directories with the gguf package's writer and name tables.

Independent of the reader under test: names, permutations and metadata follow llama.cpp's
converter.

Over 400 lines: one writer, with llama.cpp's names for the tensors of each family.
"""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

ARCHS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "PhiForCausalLM": "phi2",
    "Phi3ForCausalLM": "phi3",
    "StableLmForCausalLM": "stablelm",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "MinistralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "GlmForCausalLM": "chatglm",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "InternLM3ForCausalLM": "llama",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "ArceeForCausalLM": "arcee",
    "GPTNeoXForCausalLM": "gptneox",
    "ApertusForCausalLM": "apertus",
    "GPT2LMHeadModel": "gpt2",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "SeedOssForCausalLM": "seed_oss",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Glm4MoeForCausalLM": "glm4moe",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
}
GPT2 = {  # its names of fields that the others have
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
# For these the converter writes that scores are sigmoids: it knows it of GLM 4.5, and the configs
# of the other two state it. The config of GLM 4.7 Flash does not.
SIGMOID = ("Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM", "DeepseekV3ForCausalLM")
# For these the converter writes which layers have a window.
WINDOW_PATTERNS = ("Gemma3ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM")
LAYER = re.compile(r"(?:model\.layers|gpt_neox\.layers|transformer\.h)\.(\d+)\.")
MTP = re.compile(
    r"model\.layers\.(\d+)\."
    r"(eh_proj|embed_tokens|enorm|hnorm|shared_head\.head|shared_head\.norm)\.weight"
)
EXPERT = re.compile(r"(model\.layers\.\d+\.)\w+\.experts\.(\d+)\.(\w+)\.weight")
HEAD_NORM = re.compile(r"(model\.layers\.\d+\.self_attn\.[qk]_layernorm)\.norms\.(\d+)\.weight")
GPT_OSS = re.compile(
    r"(model\.layers\.\d+\.)(mlp\.experts\.gate_up_proj|mlp\.experts\.down_proj|self_attn\.sinks)(_bias|)"
)
XIELU = re.compile(r"model\.layers\.\d+\.mlp\.act_fn\.(\w+)")  # parameters of a layer
TRANSPOSED = re.compile(r"transformer\.h\.\d+\.\w+\.c_\w+\.weight")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# The converter permutes q and k of PERMUTED for rope over neighbours, and adds one to the norms of
# NORMS_PLUS_ONE.
PERMUTED = {"llama", "smollm3", "granite", "mistral3", "arcee"}
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3"}
NORMAL, CONTROL = 1, 3  # token types


def write_gguf(
    source: Path,
    target: Path,
    kind: str = "F32",
    *,
    max_tensors_per_part: int = 0,
    rounded: Path | None = None,
    absorbed: bool = True,
    arch: str = "",
    **metadata: Any,
) -> Path:
    """Write the model in folder `source` as GGUF `target` and return it (the first part).

    `kind` is the type of matrices whose rows are a multiple of its block, F32 that of all others;
    a type that gguf cannot quantize to (Q4_K, IQ...) gets random blocks. `rounded` names a new
    folder that gets the model as the file holds it, in float32 safetensors: a reader of the GGUF
    must equal it. Latent attention that is not `absorbed` is written as in files of before
    2025-04. `arch` replaces the name of the architecture. `metadata` adds keys;
    "tokenizer.ggml.pre" replaces the default one.
    """
    config = json.loads((source / "config.json").read_text())
    config |= {name: config[own] for own, name in GPT2.items() if own in config}
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        stored |= load_file(file)
    arch = arch or ARCHS[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, arch, split_max_tensors=max_tensors_per_part)
    num_layers = 1 + max(int(found[1]) for found in map(LAYER.match, stored) if found)
    _write_config(writer, config, absorbed, num_layers)
    _write_tokenizer(writer, source, config, metadata)
    names = gguf.get_tensor_name_map(_model_arch(arch), num_layers)
    held = _write_tensors(writer, stored, config, arch, names, GGMLQuantizationType[kind], absorbed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if rounded is not None:
        shutil.copytree(source, rounded, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(held, rounded / "model.safetensors")
    if max_tensors_per_part:
        return next(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))
    return target


def _write_config(
    writer: gguf.GGUFWriter, config: dict[str, Any], absorbed: bool, num_layers: int
) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_name("tiny")
    writer.add_block_count(num_layers)
    if num_layers > config["num_hidden_layers"]:
        writer.add_nextn_predict_layers(num_layers - config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    latent = "kv_lora_rank" in config
    writer.add_head_count_kv(1 if latent and absorbed else config["num_key_value_heads"])
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if latent:
        _write_latent(writer, config, absorbed)
        head_dim = config["qk_rope_head_dim"]
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    for key, add in {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
    }.items():
        if config.get(key) is not None:
            add(config[key])
    if config["architectures"][0] in SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["architectures"] == ["Glm4MoeForCausalLM"] or (latent and config["norm_topk_prob"]):
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["architectures"] in (
        ["Gemma2ForCausalLM"],
        ["Phi3ForCausalLM"],
        ["GptOssForCausalLM"],
        ["Cohere2ForCausalLM"],
    ):
        writer.add_sliding_window(config["sliding_window"])
    if config["architectures"] == ["Gemma2ForCausalLM"]:  # as for Gemma 3 below
        assert config["query_pre_attn_scalar"] == head_dim
    if config["architectures"] == ["GPT2LMHeadModel"]:
        return  # it has no rope
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    if config["architectures"] == ["Gemma3ForCausalLM"]:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        # What the format cannot state: readers use the head size, or 168 for 27B.
        assert config["query_pre_attn_scalar"] == head_dim
    if config["architectures"][0] in WINDOW_PATTERNS:
        writer.add_sliding_window(config["sliding_window"])
        kinds = config["layer_types"]
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if "full_attention" in rope:
        rope = rope["full_attention"]
    else:
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    growth = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))  # Hunyuan
    writer.add_rope_freq_base(rope["rope_theta"] * growth)
    _write_rope_scaling(writer, rope, head_dim, config["max_position_embeddings"])


def _write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], absorbed: bool) -> None:
    rope, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    writer.add_key_length(rank + rope if absorbed else key)
    writer.add_value_length(rank if absorbed else value)
    if absorbed:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    if kinds := config.get("mlp_layer_types"):
        writer.add_leading_dense_block_count(kinds.index("sparse"))
    weight = config["rope_parameters"].get("mscale_all_dim")
    if weight is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def _write_rope_scaling(
    writer: gguf.GGUFWriter, rope: dict[str, Any], head_dim: int, max_len: int
) -> None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
        return
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        factor = max(1.0, max_len / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original))
        writer.add_rope_scaling_attn_factors(scale)
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)
        return
    if "alpha" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(max_len)
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "attention_factor" in rope:  # of OLMo 3, as in its config
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    low_wave = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high_wave = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wave < high_wave:
            factors.append(1.0)
        elif wave > low_wave:
            factors.append(rope["factor"])
        else:
            span = rope["high_freq_factor"] - rope["low_freq_factor"]
            smooth = (
                rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            ) / span
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _write_tokenizer(
    writer: gguf.GGUFWriter, source: Path, config: dict[str, Any], metadata: dict[str, Any]
) -> None:
    document = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    texts = {index: text for text, index in document["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in document["added_tokens"]}
    size = config["vocab_size"]
    tokens = [special.get(i) or texts.get(i) or f"[PAD{i}]" for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(metadata.pop("tokenizer.ggml.pre", "gpt-2")))
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(size)])
    # The writer leaves out an empty list; a merge into a control token changes nothing.
    merges = document["model"]["merges"] or [(text[:1], text[1:]) for text in special.values()]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(bool(document["post_processor"]))
    template = source / "chat_template.jinja"
    text = template.read_text() if template.exists() else settings.get("chat_template")
    if text:
        writer.add_chat_template(text)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))


def _write_tensors(
    writer: gguf.GGUFWriter,
    stored: dict[str, torch.Tensor],
    config: dict[str, Any],
    arch: str,
    names: gguf.TensorNameMap,
    kind: GGMLQuantizationType,
    absorbed: bool,
) -> dict[str, torch.Tensor]:
    """Write all tensors; return Hugging Face name -> the float32 values that the file holds."""
    held: dict[str, torch.Tensor] = {}
    generator = np.random.default_rng(0)
    # Of experts and norms of heads: merged name -> number -> name.
    stacks: dict[str, dict[int, str]] = {}
    learned: dict[str, list[float]] = {}  # of activations: parameter -> values of the layers
    for hf_name, tensor in stored.items():
        values = tensor.float().numpy()
        if gpt_oss := GPT_OSS.fullmatch(hf_name):
            held[hf_name] = _add_gpt_oss(writer, names, *gpt_oss.groups(), values, kind, generator)
            continue
        if expert := EXPERT.fullmatch(hf_name):
            layer, number, projection = expert.groups()
            merged = f"{layer}mlp.experts.{MIXTRAL.get(projection, projection)}.weight"
            stacks.setdefault(merged, {})[int(number)] = hf_name
            continue
        if head_norm := HEAD_NORM.fullmatch(hf_name):
            stacks.setdefault(f"{head_norm[1]}.weight", {})[int(head_norm[2])] = hf_name
            continue
        if xielu := XIELU.fullmatch(hf_name):
            learned.setdefault(xielu[1], []).append(tensor.item())
            held[hf_name] = tensor
            continue
        if absorbed and hf_name.endswith("kv_b_proj.weight"):
            held[hf_name] = _add_kv_b(writer, names, hf_name, values, config, kind, generator)
            continue
        in_turn = (
            "attention.query_key_value" in hf_name
        )  # of each head; in GGUF all of q come first
        if in_turn:
            values = _swapped(values, config["num_attention_heads"], 3)
        request = hf_name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = names.get_name(request, try_suffixes=(".weight", ".bias"))
        if mtp := MTP.fullmatch(hf_name):  # not in the table of each architecture that has them
            name = f"blk.{mtp[1]}.nextn.{mtp[2].replace('.', '_')}.weight"
        transposed = TRANSPOSED.fullmatch(hf_name)
        if transposed:
            values = np.ascontiguousarray(values.T)
        if hf_name.endswith("shared_expert_gate.weight"):  # as most files have it
            values = values[0]
        assert name is not None, hf_name
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(hf_name.split(".")[-2], 0)
        permuted = arch in PERMUTED and heads
        if permuted:
            values = _permute(values, heads)
        if arch in NORMS_PLUS_ONE and hf_name.endswith("norm.weight"):
            values = values + 1
        values = _add(writer, name, values, kind, generator)
        if permuted:
            values = _permute_back(values, heads)
        if transposed:
            values = values.T
        if in_turn:
            values = _swapped(values, 3, config["num_attention_heads"])
        if arch in NORMS_PLUS_ONE and hf_name.endswith("norm.weight"):
            values = values - 1
        held[hf_name] = torch.from_numpy(np.ascontiguousarray(values))
    for parameter, of_layers in learned.items():
        getattr(writer, f"add_xielu_{parameter}")(of_layers)
    for merged, of_experts in stacks.items():
        stack = np.stack([stored[of_experts[n]].float().numpy() for n in sorted(of_experts)])
        name = names.get_name(merged, try_suffixes=(".weight",))
        assert name is not None, merged
        values = _add(writer, name, stack, kind, generator)
        for n, hf_name in of_experts.items():
            held[hf_name] = torch.from_numpy(np.ascontiguousarray(values[n]))
    return held


def _add_kv_b(
    writer: gguf.GGUFWriter,
    names: gguf.TensorNameMap,
    hf_name: str,
    values: np.ndarray,
    config: dict[str, Any],
    kind: GGMLQuantizationType,
    generator: np.random.Generator,
) -> torch.Tensor:
    """Add the projections of keys, transposed, and of values, each as a stack of heads."""
    heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
    both = values.reshape(heads, plain + config["v_head_dim"], -1)
    held = []
    for part, stack in {"k_b": both[:, :plain].swapaxes(1, 2), "v_b": both[:, plain:]}.items():
        name = names.get_name(hf_name.replace("kv_b", part), try_suffixes=(".weight",))
        assert name is not None, hf_name
        held.append(_add(writer, name, np.ascontiguousarray(stack), kind, generator))
    whole = np.concatenate((held[0].swapaxes(1, 2), held[1]), 1)
    return torch.from_numpy(np.ascontiguousarray(whole.reshape(values.shape)))


def _add_gpt_oss(
    writer: gguf.GGUFWriter,
    names: gguf.TensorNameMap,
    layer: str,
    module: str,
    bias: str,
    values: np.ndarray,
    kind: GGMLQuantizationType,
    generator: np.random.Generator,
) -> torch.Tensor:
    """Add experts [experts, inputs, outputs]: outputs first, gate and up separate. Returns the
    values that the file holds, in the original layout.
    """
    turned = values.ndim == 3  # otherwise biases
    kind = kind if turned else GGMLQuantizationType.F32
    rows = values.swapaxes(1, 2) if turned else values
    held = np.empty(rows.shape, np.float32)
    parts = {"": slice(None)}
    if module.endswith("gate_up_proj"):
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    for part, some in parts.items():
        hf_name = layer + module.replace("gate_up_proj", part) + (".bias" if bias else ".weight")
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        index = (slice(None), some) if part else slice(None)
        held[index] = _add(writer, name, np.ascontiguousarray(rows[index]), kind, generator)
    return torch.from_numpy(np.ascontiguousarray(held.swapaxes(1, 2) if turned else held))


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray,
    kind: GGMLQuantizationType,
    generator: np.random.Generator,
) -> np.ndarray:
    """Add a tensor and return the values that the file then holds."""
    block_values = gguf.GGML_QUANT_SIZES[kind][0]
    if values.ndim < 2 or values.shape[-1] % block_values:
        kind = GGMLQuantizationType.F32
    try:
        data = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        data = _random_blocks(values.shape, kind, generator)
    writer.add_tensor(name, data, raw_dtype=kind)
    return np.array(gguf.quants.dequantize(data, kind), np.float32).reshape(values.shape)


def _random_blocks(
    shape: tuple[int, ...], kind: GGMLQuantizationType, generator: np.random.Generator
) -> np.ndarray:
    """Return blocks with small finite values: blocks with others are drawn again."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = math.prod(shape) // block_values
    blocks = np.zeros((count, block_bytes), np.uint8)
    bad = np.ones(count, bool)
    while bad.any():
        drawn = generator.integers(0, 256, (int(bad.sum()), block_bytes), np.uint8)
        drawn[:, 1::2] &= 0xA3  # float16 scales become small, whichever bytes hold them
        blocks[bad] = drawn
        values = gguf.quants.dequantize(blocks, kind).reshape(count, -1)
        with np.errstate(invalid="ignore"):
            bad = ~(np.abs(values).max(axis=1) < 0.5)
    return blocks.reshape(*shape[:-1], -1)


def _swapped(values: np.ndarray, outer: int, inner: int) -> np.ndarray:
    """Reorder rows from (outer, inner, rest) to (inner, outer, rest)."""
    split = values.reshape(outer, inner, -1, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(0, 1).reshape(values.shape))


def _permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Permute rows of each head from (half, pair) to (pair, half)."""
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _permute_back(values: np.ndarray, heads: int) -> np.ndarray:
    split = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def _model_arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
