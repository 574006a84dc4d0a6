"""The only description of a model's layers: which parts, in which order, with which tensors.

Weight loading and all decoders read it. No other module knows the names of a layer's tensors,
except engine/architectures where checkpoints use other names, and the names in GGUF files.
"""

from collections.abc import Iterator
from dataclasses import replace

from pdserve.engine.models.config import ModelConfig, NormPlacement
from pdserve.engine.models.parts import (
    Activate,
    Add,
    Attention,
    Gate,
    HeadLayerNorm,
    HeadNorm,
    Heads,
    Hold,
    LayerNorm,
    Linear,
    Norm,
    Part,
    Replace,
    Rope,
    Scale,
    TensorSpec,
)

EMBEDDING = "model.embed_tokens.weight"
EMBEDDING_NORM = "model.embedding_norm"
HEAD, HEAD_BIAS = "lm_head.weight", "lm_head.bias"
FINAL_NORM = "model.norm"
PRE_NORMS = NormPlacement(attn_in="input_layernorm", ffn_in="post_attention_layernorm")


def layer_parts(config: ModelConfig, n: int) -> tuple[Part, ...]:
    """Return the parts of layer n in the order in which they are computed."""
    layer, prefix, placement = config.layers[n], f"model.layers.{n}.", config.norms
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    attn, hidden = prefix + "self_attn.", config.hidden_size
    qkv = qkv_sizes(config)
    q_size, kv_size, _ = qkv.values()

    encoder = config.encoder

    def norm(name: str | None) -> Iterator[Part]:
        if name:
            yield _norm(config, prefix + name)
            if encoder and encoder.post_norm:
                yield Replace()

    def first_norm() -> Iterator[Part]:
        if encoder and n == 0:
            yield from (_norm(config, EMBEDDING_NORM), Replace())
        else:
            yield from norm(placement.attn_in)

    def head_norm() -> Iterator[Part]:
        if config.qk_norm == "head_layer":
            counts = {"q": heads.q, "k": heads.kv}
            q_specs, k_specs = (
                tuple(TensorSpec(f"{attn}{name}_norm.{i}.weight", (heads.dim,)) for i in range(n))
                for name, n in counts.items()
            )
            yield HeadLayerNorm(heads, q_specs, k_specs, config.norm_eps)
        elif config.qk_norm:
            per_head = config.qk_norm != "row"
            sizes = {
                "q": heads.dim if per_head else q_size,
                "k": heads.dim if per_head else kv_size,
            }
            q, k = (TensorSpec(f"{attn}{name}_norm.weight", (n,)) for name, n in sizes.items())
            yield HeadNorm(heads, q, k, config.norm_offset, config.norm_eps)

    def rotation() -> Iterator[Part]:
        if layer.rope and layer.rope != layer.rope.of_keys():
            yield Rope(replace(heads, kv=0), layer.rope)
            yield Rope(replace(heads, q=0), layer.rope.of_keys(), q_size)
        elif layer.rope:
            yield Rope(heads, layer.rope)

    def plain() -> tuple[Part, ...]:
        sinks = TensorSpec(attn + "sinks", (heads.q,)) if config.sinks else None
        rotated_first = config.qk_norm == "rotated_head"
        return (
            linear(attn, qkv, hidden, config.qkv_bias),
            *(rotation() if rotated_first else ()),
            *head_norm(),
            *(() if rotated_first else rotation()),
            Attention(
                heads,
                config.attn_scale,
                config.attn_soft_cap,
                layer.window,
                sinks,
                causal=encoder is None,
            ),
        )

    scale = () if config.residual_scale == 1 else (Scale(config.residual_scale),)
    ffn = layer.feed_forward.parts(config, prefix) if layer.feed_forward else _mlp(config, prefix)
    attention: tuple[Part, ...]
    if config.latent:
        attention, attention_size = (
            config.latent.parts(config, n),
            heads.q * config.latent.value_dim,
        )
    else:
        attention, attention_size = plain(), q_size
    return (
        *first_norm(),
        *attention,
        linear(attn, {"o_proj": hidden}, attention_size, config.o_bias),
        *norm(placement.attn_out),
        *scale,
        Hold() if config.parallel else Add(),
        *norm(placement.ffn_in),
        *ffn,
        *norm(placement.ffn_out),
        *scale,
        Add(held=config.parallel),
    )


def qkv_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the number of rows of the matrices that make queries, keys and values, by module
    name."""
    kv_size = config.num_kv_heads * config.head_dim
    q_size = config.num_heads * config.head_dim
    return {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}


def linear(prefix: str, outputs: dict[str, int], inputs: int, has_bias: bool = False) -> Linear:
    """Return the part that multiplies by one or several matrices [outputs, inputs]; `outputs` maps
    the name of each matrix's module to its number of rows."""
    weights = (TensorSpec(f"{prefix}{name}.weight", (n, inputs)) for name, n in outputs.items())
    biases = (TensorSpec(f"{prefix}{name}.bias", (n,)) for name, n in outputs.items())
    return Linear(tuple(weights), tuple(biases) if has_bias else ())


def final_norm(config: ModelConfig) -> Norm | LayerNorm:
    """Return the norm between the last layer and the head, which makes logits."""
    return _norm(config, FINAL_NORM)


def head(config: ModelConfig) -> Linear:
    """Return the product that turns hidden states into logits; if the head is tied, its matrix is
    the embedding."""
    bias = (TensorSpec(HEAD_BIAS, (config.vocab_size,)),) if config.head_bias else ()
    name = EMBEDDING if config.tied_head else HEAD
    return Linear((TensorSpec(name, (config.vocab_size, config.hidden_size)),), bias)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a decoder of `config` loads, in the order of
    loading."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    if config.positions:
        shapes |= config.positions.shapes(config.hidden_size)
    layers = (part for n in range(config.num_layers) for part in layer_parts(config, n))
    for part in (*layers, final_norm(config), head(config)):
        shapes |= {tensor.name: tensor.shape for tensor in part.tensors()}
    if config.classifier:
        shapes |= config.classifier.shapes(config.hidden_size)
    return shapes


def _norm(config: ModelConfig, name: str) -> Norm | LayerNorm:
    weight, bias = (
        TensorSpec(f"{name}.{leaf}", (config.hidden_size,)) for leaf in ("weight", "bias")
    )
    if config.norm_kind == "layer":
        return LayerNorm(weight, bias if config.norm_bias else None, config.norm_eps)
    return Norm(weight, config.norm_offset, config.norm_eps)


def _mlp(config: ModelConfig, prefix: str) -> tuple[Part, ...]:
    """Return the parts of a dense feed-forward: down(activation(gate x) * up x) if gated, else
    down(activation(up x))."""
    mlp, hidden, size, bias = prefix + "mlp.", config.hidden_size, config.ffn_size, config.ffn_bias
    inputs = {"gate_proj": size, "up_proj": size} if config.gated else {"up_proj": size}
    return (
        linear(mlp, inputs, hidden, bias),
        Gate(config.activation) if config.gated else Activate(config.activation),
        linear(mlp, {"down_proj": hidden}, size, bias),
    )
