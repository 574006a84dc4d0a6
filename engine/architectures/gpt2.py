"""GPT-2: learned absolute positions, layer norms with biases, and a feed-forward without a gate."""

from collections.abc import Iterator
from dataclasses import replace

from pdserve.engine.checkpoints import View, first_of, fused
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models import (
    EMBEDDING,
    POSITIONS,
    LayerConfig,
    LearnedPositions,
    ModelConfig,
    ModelSpec,
    UnsupportedModel,
    qkv_sizes,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    head_dim,
    integer,
    layer_norms,
    num_layers,
    standard,
)

# GPT-2's names of fields; a GGUF file is read under the usual ones.
FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
LEAVES = ("weight", "bias")
UNSUPPORTED = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
MATRICES = {  # stored as [inputs, outputs]
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def parse(hf: HfConfig) -> ModelConfig:
    for key in UNSUPPORTED:
        if hf.get(key):
            raise UnsupportedModel(f"config field {key}={hf[key]!r} is not supported")
    hf = {**hf, **{usual: hf[name] for name, usual in FIELDS.items() if name in hf}}
    # Fields that it does not have, and transformers ignores.
    hf |= {"num_key_value_heads": None, "head_dim": None}
    if "n_embd" in hf:
        hf["intermediate_size"] = integer(hf, "n_inner", 4 * integer(hf, "n_embd"))
    scaled = bool(hf.get("scale_attn_weights", True))
    return standard(
        {"hidden_act": "gelu_new", "tie_word_embeddings": True, **hf},
        layers=(LayerConfig(rope=None),) * num_layers(hf),
        positions=LearnedPositions(integer(hf, "max_position_embeddings")),
        attn_scale=head_dim(hf) ** -0.5 if scaled else 1.0,
        **layer_norms(hf),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
    )


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that find the model's tensors under GPT-2's names. Matrices are transposed, and
    one has q, k and v; in GGUF, it is not transposed."""
    views = {EMBEDDING: View("wte.weight"), POSITIONS: View("wpe.weight")}
    views |= {f"model.norm.{leaf}": View(f"ln_f.{leaf}") for leaf in LEAVES}
    for n in range(config.num_layers):
        for name, other in (NORMS | MATRICES).items():
            for leaf in LEAVES:
                transposed = name in MATRICES and leaf == "weight"
                view = View(f"h.{n}.{other}.{leaf}", transposed=transposed)
                views[f"model.layers.{n}.{name}.{leaf}"] = view
    views = {name: first_of(*_named(view)) for name, view in views.items()}
    for n in range(config.num_layers):
        in_gguf = fused(f"model.layers.{n}.self_attn.", "qkv_proj", qkv_sizes(config))
        for name, view in in_gguf.items():
            leaf = name.rpartition(".")[2]
            source = f"h.{n}.attn.c_attn.{leaf}"
            one = replace(view, source=source, transposed=leaf == "weight")
            views[name] = first_of(*_named(one), view)
    return views


def _named(view: View) -> Iterator[View]:
    """Yield the view under both names of its tensor: in a model with a head, and in one that was
    saved without, like the first release."""
    for prefix in ("transformer.", ""):
        yield replace(view, source=prefix + view.source)


GGUF = GgufMapping(
    "gpt2",
    tensors={
        "position_embd": POSITIONS.removesuffix(".weight"),
        "blk.{n}.attn_qkv": "model.layers.{n}.self_attn.qkv_proj",
    },
)
SPEC = ModelSpec(("GPT2LMHeadModel",), parse, GGUF, stored)
