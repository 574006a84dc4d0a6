"""Mappings of an architecture's GGUF names and values to Hugging Face's.

The defaults apply to every architecture; a mapping's fields hold its differences. Data only: each
module of engine/architectures defines its mapping, and engine/checkpoints/gguf/checkpoint.py
applies it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    "attn_q": MatrixRole.OTHER,
    "attn_k": MatrixRole.KEY,
    "attn_v": MatrixRole.VALUE,
    "attn_qkv": MatrixRole.VALUE,
    "attn_output": MatrixRole.OUTPUT,
    "attn_q_a": MatrixRole.OTHER,
    "attn_q_b": MatrixRole.OTHER,
    "attn_kv_a_mqa": MatrixRole.OTHER,
    "attn_kv_b": MatrixRole.VALUE,
    "attn_k_b": MatrixRole.OTHER,
    "attn_v_b": MatrixRole.OTHER,
    "ffn_gate": MatrixRole.OTHER,
    "ffn_up": MatrixRole.OTHER,
    "ffn_down": MatrixRole.DOWN,
    "ffn_gate_exps": MatrixRole.OTHER,
    "ffn_up_exps": MatrixRole.OTHER,
    "ffn_gate_up_exps": MatrixRole.OTHER,
    "ffn_down_exps": MatrixRole.DOWN,
    "ffn_gate_shexp": MatrixRole.OTHER,
    "ffn_up_shexp": MatrixRole.OTHER,
    "ffn_down_shexp": MatrixRole.DOWN,
}
OF_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)(?:\.\d+)?\.weight")
# Hugging Face's module that a `permuted` mapping permutes -> its head count in config.json.
PERMUTED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def no_config(metadata: Metadata) -> dict[str, Any]:
    """Return no entries: for an architecture whose config follows from the common keys."""
    return {}


@dataclass(frozen=True, slots=True)
class GgufMapping:
    """The mapping of one `general.architecture`. Names in `tensors` omit .weight and .bias."""

    arch: str  # general.architecture
    tensors: Mapping[str, str] = field(default_factory=dict)  # replaces or adds to TENSORS
    config: Callable[[Metadata], dict[str, Any]] = (
        no_config  # config.json entries beyond common ones
    )
    permuted: bool = False  # q and k rows are stored as (half, pair) interleaved for GGML's rope
    norm_offset: float = 0.0  # the file's norm weights minus Hugging Face's

    def hf_name(self, gguf_name: str) -> str | None:
        """Return Hugging Face's name of a tensor, or None if the architecture lacks the tensor."""
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
        """Return the config.json key with the head count of a tensor whose rows are permuted; empty
        for other tensors."""
        module = hf_name.split(".")[-2:-1]
        return PERMUTED.get(module[0], "") if self.permuted and module else ""


def tensor_role(gguf_name: str, tied: bool) -> tuple[MatrixRole, int] | None:
    """Return the role and the layer of a matrix; None if it is never quantized. `tied`: the
    embedding also serves as the head."""
    if gguf_name in ("token_embd.weight", "output.weight"):
        is_head = tied or gguf_name == "output.weight"
        return (MatrixRole.HEAD if is_head else MatrixRole.OTHER), 0
    match = OF_LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in ROLES:
        return None
    return ROLES[match[2]], int(match[1])
