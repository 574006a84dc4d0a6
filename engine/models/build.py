"""From a ModelConfig and named weights to layers: the names and shapes of Hugging Face tensors."""

import torch
from torch import Tensor

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layers.attention import Attention
from pdserve.engine.models.layers.block import Block, Norms
from pdserve.engine.models.layers.feed_forward import GatedMlp
from pdserve.engine.models.layers.linear import Linear
from pdserve.engine.models.layers.rope import RopeTable
from pdserve.engine.weights.stored import Weight, Weights, expand
from pdserve.kernels.ops import Ops


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a Decoder of `config` asks for, and its shape."""
    hidden, ffn, size = config.hidden_size, config.ffn_size, config.head_dim
    q, kv = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (ffn, hidden, config.ffn_bias),
        "mlp.up_proj": (ffn, hidden, config.ffn_bias),
        "mlp.down_proj": (hidden, ffn, config.ffn_bias),
    }
    places = config.norms
    norms = {name: hidden for name in (places.attn_in, places.attn_out) if name}
    norms |= {name: hidden for name in (places.ffn_in, places.ffn_out) if name}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": size, "self_attn.k_norm": size}
    for n in range(config.num_layers):
        prefix = f"model.layers.{n}."
        for name, (outputs, inputs, has_bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (outputs, inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (outputs,)
        shapes |= {f"{prefix}{name}.weight": (length,) for name, length in norms.items()}
    return shapes


def norm_weight(config: ModelConfig, weight: Weight) -> Tensor:
    """As the norm operations take it: float32, the architecture's offset added."""
    return expand(weight, torch.float32) + config.norm_offset


def block(
    config: ModelConfig, n: int, weights: Weights, ops: Ops, dtype: torch.dtype, rope: RopeTable
) -> Block:
    """Layer n."""
    prefix = f"model.layers.{n}."

    def linear(has_bias: bool, *names: str) -> Linear:
        matrices = [weights(f"{prefix}{name}.weight") for name in names]
        biases = [weights(f"{prefix}{name}.bias") for name in names] if has_bias else []
        return Linear(ops, matrices, biases, dtype)

    def norm(name: str | None) -> Tensor | None:
        return norm_weight(config, weights(f"{prefix}{name}.weight")) if name else None

    attention = Attention(
        ops,
        config,
        config.layers[n].window,
        rope,
        qkv=linear(config.qkv_bias, *(f"self_attn.{part}_proj" for part in "qkv")),
        out=linear(config.o_bias, "self_attn.o_proj"),
        q_norm=norm("self_attn.q_norm" if config.qk_norm else None),
        k_norm=norm("self_attn.k_norm" if config.qk_norm else None),
    )
    places = config.norms
    norms = Norms(
        norm(places.attn_in),
        norm(places.attn_out),
        norm(places.ffn_in),
        norm(places.ffn_out),
        config.norm_eps,
    )
    gate_up = linear(config.ffn_bias, "mlp.gate_proj", "mlp.up_proj")
    down = linear(config.ffn_bias, "mlp.down_proj")
    return Block(ops, norms, attention, GatedMlp(ops, config.activation, gate_up, down))
