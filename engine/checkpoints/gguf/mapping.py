"""Translates GGUF to Hugging Face's terms: tensor names, and metadata to the entries of
config.json.

The defaults apply to every architecture; a GgufMapping holds the differences of one. Each module of
engine/architectures defines its mapping, and GgufCheckpoint applies it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.checkpoints.source import CheckpointError
from pdserve.engine.weights import MatrixRole

Metadata = Mapping[str, Any]  # GGUF key -> number, bool, str or list of them

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{n}.attn_norm": "model.layers.{n}.input_layernorm",
    "blk.{n}.attn_q": "model.layers.{n}.self_attn.q_proj",
    "blk.{n}.attn_k": "model.layers.{n}.self_attn.k_proj",
    "blk.{n}.attn_v": "model.layers.{n}.self_attn.v_proj",
    "blk.{n}.attn_output": "model.layers.{n}.self_attn.o_proj",
    "blk.{n}.attn_q_norm": "model.layers.{n}.self_attn.q_norm",
    "blk.{n}.attn_k_norm": "model.layers.{n}.self_attn.k_norm",
    "blk.{n}.ffn_norm": "model.layers.{n}.post_attention_layernorm",
    "blk.{n}.ffn_gate": "model.layers.{n}.mlp.gate_proj",
    "blk.{n}.ffn_up": "model.layers.{n}.mlp.up_proj",
    "blk.{n}.ffn_down": "model.layers.{n}.mlp.down_proj",
    "blk.{n}.ffn_gate_inp": "model.layers.{n}.mlp.gate",
    "blk.{n}.exp_probs_b": "model.layers.{n}.mlp.gate.e_score_correction",
    "blk.{n}.ffn_gate.{e}": "model.layers.{n}.mlp.experts.{e}.gate_proj",  # Mixtral's first files
    "blk.{n}.ffn_up.{e}": "model.layers.{n}.mlp.experts.{e}.up_proj",
    "blk.{n}.ffn_down.{e}": "model.layers.{n}.mlp.experts.{e}.down_proj",
    "blk.{n}.ffn_gate_up_exps": "model.layers.{n}.mlp.experts.gate_up_proj",
    "blk.{n}.ffn_gate_exps": "model.layers.{n}.mlp.experts.gate_proj",
    "blk.{n}.ffn_up_exps": "model.layers.{n}.mlp.experts.up_proj",
    "blk.{n}.ffn_down_exps": "model.layers.{n}.mlp.experts.down_proj",
    "blk.{n}.ffn_gate_inp_shexp": "model.layers.{n}.mlp.shared_expert_gate",
    "blk.{n}.ffn_gate_shexp": "model.layers.{n}.mlp.shared_experts.gate_proj",
    "blk.{n}.ffn_up_shexp": "model.layers.{n}.mlp.shared_experts.up_proj",
    "blk.{n}.ffn_down_shexp": "model.layers.{n}.mlp.shared_experts.down_proj",
    # Layers that predict further tokens (MTP)
    "blk.{n}.nextn.eh_proj": "model.layers.{n}.eh_proj",
    "blk.{n}.nextn.embed_tokens": "model.layers.{n}.embed_tokens",
    "blk.{n}.nextn.enorm": "model.layers.{n}.enorm",
    "blk.{n}.nextn.hnorm": "model.layers.{n}.hnorm",
    "blk.{n}.nextn.shared_head_head": "model.layers.{n}.shared_head.head",
    "blk.{n}.nextn.shared_head_norm": "model.layers.{n}.shared_head.norm",
}
# The matrices that are quantized, and their roles in a mix of formats. All other matrices keep
# their format: routers, position tables, convolutions, unknown ones.
ROLES = {
    name: role
    for role, names in (
        (MatrixRole.KEY, "attn_k"),
        (MatrixRole.VALUE, "attn_v attn_qkv attn_kv_b"),
        (MatrixRole.OUTPUT, "attn_output"),
        (MatrixRole.DOWN, "ffn_down ffn_down_exps ffn_down_shexp"),
        (MatrixRole.OTHER, "attn_q attn_q_a attn_q_b attn_kv_a_mqa attn_k_b attn_v_b"),
        (MatrixRole.OTHER, "ffn_gate ffn_gate_exps ffn_gate_shexp ffn_gate_up_exps"),
        (MatrixRole.OTHER, "ffn_up ffn_up_exps ffn_up_shexp"),
    )
    for name in names.split()
}
OF_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)(?:\.\d+)?\.weight")
# Hugging Face's module that a `permuted` mapping permutes -> its head count in config.json.
PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def no_config(metadata: Metadata) -> dict[str, Any]:
    """Return no extra config entries: for an architecture whose config follows from the common GGUF
    keys."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufMapping:
    """How GGUF files of one architecture translate to Hugging Face's terms, where this differs from
    the defaults. Tensor names in `tensors` omit .weight and .bias."""

    arch: str  # general.architecture
    tensors: Mapping[str, str] = field(default_factory=dict)  # replaces or adds to TENSORS
    config: Callable[[Metadata], dict[str, Any]] = (
        no_config  # config.json entries beyond common ones
    )
    # Tensors of one value per layer that the file has as metadata: key -> name and shape.
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    permuted: bool = False  # q and k rows are stored as (half, pair) interleaved for GGML's rope
    norm_offset: float = 0.0  # the file's norm weights minus Hugging Face's
    scorer: str = ""  # Hugging Face class of a file with a head that scores; empty: no such files

    def hf_name(self, gguf_name: str) -> str | None:
        """Return Hugging Face's name of a GGUF tensor, or None if the architecture has no such
        tensor."""
        stem, dot, leaf = gguf_name.rpartition(".")
        parts = stem.split(".")
        layer = expert = ""
        if len(parts) > 2 and parts[0] == "blk" and parts[1].isdigit():
            layer, parts[1] = parts[1], "{n}"
        if len(parts) == 4 and layer and parts[3].isdigit():
            expert, parts[3] = parts[3], "{e}"
        key = ".".join(parts)
        target = self.tensors.get(key) or TENSORS.get(key)
        if target is None:
            return None
        return target.replace("{n}", layer).replace("{e}", expert) + dot + leaf

    def heads_key(self, hf_name: str) -> str:
        """Return the config.json key with the head count of a tensor whose rows GGUF permutes;
        empty for any other tensor."""
        module = hf_name.split(".")[-2:-1]
        return PERMUTED.get(module[0], "") if self.permuted and module else ""


def tensor_role(gguf_name: str, tied: bool) -> tuple[MatrixRole, int] | None:
    """Return (role, layer) of a matrix in a mix of quantization formats; None for a tensor that is
    never quantized. `tied`: the embedding matrix is also the output head."""
    if gguf_name in ("token_embd.weight", "output.weight"):
        is_head = tied or gguf_name == "output.weight"
        return (MatrixRole.HEAD if is_head else MatrixRole.OTHER), 0
    match = OF_LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in ROLES:
        return None
    return ROLES[match[2]], int(match[1])


REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
EPSILONS = {  # one of these is required
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
# Keys that do not affect results, or whose content is known from other data.
HARMLESS = frozenset(
    {
        "vocab_size",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "pooling_type",
        "normalize_embeddings",
        "classifier.output_labels",
        "expert_feed_forward_length",
    }
)
# Values at which other keys do not affect results.
NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.scale": 0.0,
    "logit_scale": 0.0,
    "attention.sliding_window": 0,
    "rope.dimension_count_swa": 0,
    "expert_shared_count": 0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}
COMMON = ("expert_count", "expert_used_count", "expert_feed_forward_length")
# Keys of grouped experts after dense layers (DeepSeek V3).
GROUPED = (
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_scale",
    "expert_weights_norm",
    "leading_dense_block_count",
)
KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
# Entries of config.json that are the number of rows of a tensor, 0 if the file lacks it.
ROWS = {"type_vocab_size": "token_types.weight", "num_labels": "cls.output.weight"}
SCORES = {1: "softmax", 2: "sigmoid"}  # values of expert_gating_func


def common_config(
    metadata: Metadata,
    tensors: Mapping[str, tuple[int, ...]],
    rope_factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Translate the GGUF metadata that every architecture may have to config.json entries.

    `tensors`: GGUF names and shapes of the stored tensors. `rope_factors`: the values of the stored
    rope tensors, by "factors", "short_factor" and "long_factor". Raises CheckpointError if a
    required key is missing or differs between layers.
    """
    arch = metadata["general.architecture"]
    config: dict[str, Any] = {
        hf: one_number(metadata, f"{arch}.{key}") for key, hf in REQUIRED.items()
    }
    if f"{arch}.nextn_predict_layers" in metadata:  # block_count includes these layers
        config["num_hidden_layers"] -= one_number(metadata, f"{arch}.nextn_predict_layers")
    epsilons = [key for key in EPSILONS if f"{arch}.{key}" in metadata]
    for key in epsilons or EPSILONS:
        config[EPSILONS[key]] = one_number(metadata, f"{arch}.{key}")
    for key, hf in OPTIONAL.items():
        if f"{arch}.{key}" in metadata:
            config[hf] = one_number(metadata, f"{arch}.{key}")
    value_length = metadata.get(f"{arch}.attention.value_length")
    is_latent = f"{arch}.attention.kv_lora_rank" in metadata
    if not is_latent and value_length not in (None, metadata.get(f"{arch}.attention.key_length")):
        raise CheckpointError(
            f"GGUF attention values have {value_length} dims per head, but keys have another number"
        )
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = any(f"blk.0.{x}.bias" in tensors for x in ("attn_q", "attn_qkv"))
    config["attention_out_bias"] = "blk.0.attn_output.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    for key, name in ROWS.items():  # early files have a matrix of one row as a vector
        shape = tensors.get(name, (0, 0))
        config[key] = shape[0] if len(shape) == 2 else 1
    scaling = rope_scaling(metadata, rope_factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    config["partial_rotary_factor"] = _rotary_share(metadata, config)
    for kind in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{kind}_token_id")) is not None:
            config[f"{kind}_token_id"] = token
    return config


class ReadMetadata(Mapping[str, Any]):
    """GGUF metadata that records which keys are read, to find those that no code understands."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._metadata[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)

    def __contains__(self, key: object) -> bool:
        return key in self._metadata

    def unread_keys(self) -> list[str]:
        """Return the keys of the model's architecture that were not read although they could affect
        results."""
        arch = self._metadata["general.architecture"]
        unscaled = self._metadata.get(f"{arch}.rope.scaling.type", "none") == "none"
        unknown = []
        for key, value in self._metadata.items():
            suffix = key.removeprefix(f"{arch}.")
            if suffix == key or key in self._read or suffix in HARMLESS:
                continue
            if value == NEUTRAL.get(suffix) or (unscaled and suffix.startswith("rope.scaling.")):
                continue
            unknown.append(key)
        return sorted(unknown)


def one_number(metadata: Metadata, key: str) -> int | float:
    """Return a number from GGUF metadata; a list of one value per layer is accepted if all are
    equal. Raises CheckpointError if the key is missing or has another value."""
    value = metadata.get(key)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        problem = "is missing" if value is None else "is not one number"
        raise CheckpointError(f"GGUF metadata key {key} {problem}")
    return value


def rope_scaling(
    metadata: Metadata, factors: Mapping[str, Sequence[float]]
) -> dict[str, Any] | None:
    """Translate GGUF metadata to config.json's `rope_scaling`; None if the model does not scale
    rope.

    `factors` holds the divisors of rope's frequencies that some files store as tensors: Llama 3 one
    tensor in place of scaling parameters, models with longrope two. They are passed on.
    """
    prefix = f"{metadata['general.architecture']}.rope.scaling."
    scaling: dict[str, Any]
    kind = metadata.get(prefix + "type", "none")
    if set(factors) == {"short_factor", "long_factor"} and kind in ("none", "longrope"):
        original = one_number(metadata, prefix + "original_context_length")
        scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
        if prefix + "attn_factor" in metadata:
            scaling["attention_factor"] = one_number(metadata, prefix + "attn_factor")
        return scaling
    if factors:
        if kind != "none" or set(factors) != {"factors"}:
            raise CheckpointError(
                f"GGUF rope tensors {sorted(factors)} do not match the rope scaling type {kind!r}"
            )
        return {"rope_type": "factors", **factors}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": one_number(metadata, prefix + "factor")}
    if kind == "yarn":
        key = prefix + "original_context_length"
        scaling["original_max_position_embeddings"] = one_number(metadata, key)
        for key, hf in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if prefix + key in metadata:
                scaling[hf] = one_number(metadata, prefix + key)
        if prefix + "attn_factor" in metadata:
            # GGML multiplies attn_factor by yarn's magnitude; config.json holds the product.
            magnitude = 0.1 * math.log(scaling["factor"]) + 1.0
            scaling["attention_factor"] = magnitude * one_number(metadata, prefix + "attn_factor")
        if prefix + "yarn_attn_factor" in metadata:  # as in config.json
            scaling["attention_factor"] = one_number(metadata, prefix + "yarn_attn_factor")
    return scaling


def window_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json's fields of sliding windows: their size and, if the file names them, the
    layers that have one; empty for a file without windows."""
    prefix = f"{metadata['general.architecture']}.attention.sliding_window"
    config: dict[str, Any] = {}
    pattern = metadata.get(f"{prefix}_pattern")
    if metadata.get(prefix):
        config["sliding_window"] = metadata[prefix]
        if isinstance(pattern, Sequence):
            config["layer_types"] = [f"{'sliding' if has else 'full'}_attention" for has in pattern]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
    return config


def encoder_config(metadata: Metadata) -> dict[str, Any]:
    """Check that the attention of an encoder is not causal; return no config entries, because the
    common ones suffice. Raises CheckpointError if it is."""
    key = f"{metadata['general.architecture']}.attention.causal"
    if metadata.get(key):
        raise CheckpointError(f"GGUF key {key} is true: expected an encoder")
    return {}


def _rotary_share(metadata: Metadata, config: dict[str, Any]) -> float:
    """Return the fraction of a head's dimensions that rope rotates; 1 if the file does not say."""
    key = f"{metadata['general.architecture']}.rope.dimension_count"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    return one_number(metadata, key) / head_dim if key in metadata and head_dim else 1.0


def expert_config(metadata: Metadata, *extra_keys: str, scores: str = "softmax") -> dict[str, Any]:
    """Translate the GGUF keys of a mixture of experts to config.json entries: COMMON and
    `extra_keys`, as far as the file has them. Other keys stay unread, so that the checkpoint
    rejects them. Raises CheckpointError if the file needs another function of expert scores than
    `scores`."""
    arch = metadata["general.architecture"]
    gating = metadata.get(f"{arch}.expert_gating_func", 0)  # 0: not specified
    if gating and SCORES.get(gating) != scores:
        raise CheckpointError(f"GGUF key {arch}.expert_gating_func is {gating}: expected {scores}")
    keys = (key for key in (*COMMON, *extra_keys) if f"{arch}.{key}" in metadata)
    return {KEYS[key]: metadata[f"{arch}.{key}"] for key in keys}
