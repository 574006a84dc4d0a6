"""The one description of a model's layers: which parts, in which order, on which tensors.

Loading, the torch decoder and the native decoder read it; no other module knows the names of a
layer's tensors, but architectures/ where one differs, and the names in GGUF files.
"""

from collections.abc import Iterator

from pdserve.engine.models.config import ModelConfig, NormPlacement
from pdserve.engine.models.parts import (
    Add,
    Attention,
    Gate,
    HeadNorm,
    Heads,
    Linear,
    Norm,
    Part,
    Rope,
    TensorSpec,
)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"
PRE_NORMS = NormPlacement(attn_in="input_layernorm", ffn_in="post_attention_layernorm")


def layer_parts(config: ModelConfig, n: int) -> tuple[Part, ...]:
    """The parts of layer n in the order in which they are computed."""
    layer, prefix, places = config.layers[n], f"model.layers.{n}.", config.norms
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    q_size, kv_size = heads.q * heads.dim, heads.kv * heads.dim
    attn, hidden = prefix + "self_attn.", config.hidden_size
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def norm(name: str | None) -> Iterator[Part]:
        if name:
            yield _norm(config, f"{prefix}{name}.weight")

    def head_norm() -> Iterator[Part]:
        if config.qk_norm:
            q, k = (TensorSpec(f"{attn}{name}_norm.weight", (heads.dim,)) for name in "qk")
            yield HeadNorm(heads, q, k, config.norm_offset, config.norm_eps)

    ffn = layer.feed_forward.parts(config, prefix) if layer.feed_forward else _mlp(config, prefix)
    return (
        *norm(places.attn_in),
        linear(attn, qkv, hidden, config.qkv_bias),
        *head_norm(),
        Rope(heads, layer.rope),
        Attention(heads, config.attn_scale, config.attn_soft_cap, layer.window),
        linear(attn, {"o_proj": hidden}, q_size, config.o_bias),
        *norm(places.attn_out),
        Add(),
        *norm(places.ffn_in),
        *ffn,
        *norm(places.ffn_out),
        Add(),
    )


def linear(prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool = False) -> Linear:
    """Matrices [outputs, inputs] over one input, by the names of their modules."""
    weights = (TensorSpec(f"{prefix}{name}.weight", (n, inputs)) for name, n in outputs.items())
    biases = (TensorSpec(f"{prefix}{name}.bias", (n,)) for name, n in outputs.items())
    return Linear(tuple(weights), tuple(biases) if has_bias else ())


def final_norm(config: ModelConfig) -> Norm:
    """The norm between the last layer and the head."""
    return _norm(config, FINAL_NORM)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a decoder of `config` asks for, and its shape, in the order of loading."""
    vocabulary = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: vocabulary}
    for n in range(config.num_layers):
        for part in layer_parts(config, n):
            shapes |= {tensor.name: tensor.shape for tensor in part.tensors()}
    shapes |= {tensor.name: tensor.shape for tensor in final_norm(config).tensors()}
    return shapes if config.tied_head else shapes | {HEAD: vocabulary}


def _norm(config: ModelConfig, name: str) -> Norm:
    return Norm(TensorSpec(name, (config.hidden_size,)), config.norm_offset, config.norm_eps)


def _mlp(config: ModelConfig, prefix: str) -> tuple[Part, ...]:
    """down(activation(gate x) * up x)."""
    mlp, hidden, size = prefix + "mlp.", config.hidden_size, config.ffn_size
    return (
        linear(mlp, {"gate_proj": size, "up_proj": size}, hidden, config.ffn_bias),
        Gate(config.activation),
        linear(mlp, {"down_proj": hidden}, size, config.ffn_bias),
    )
