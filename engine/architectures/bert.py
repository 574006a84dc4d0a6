"""BERT: an encoder with learned positions and layer norms on the residual stream
(arXiv:1810.04805)."""

from pdserve.engine.checkpoints import Checkpoint, View, first_of
from pdserve.engine.models import (
    EMBEDDING,
    EMBEDDING_NORM,
    POSITIONS,
    PRE_NORMS,
    TYPES,
    Encoder,
    LayerConfig,
    LearnedPositions,
    ModelConfig,
    ModelSpec,
    UnsupportedModel,
)
from pdserve.engine.models.hf_config import HfConfig, integer, num_layers, positive, standard

PREFIX = "bert."  # of checkpoints that were saved with a head
LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
UNUSED = ("pooler.", "cls.", "lm_head.")  # heads


def parse(hf: HfConfig) -> ModelConfig:
    return parse_bert(hf, first=0)


def parse_bert(hf: HfConfig, first: int) -> ModelConfig:
    """Parse the config of BERT or of a model with its layers. `first`: the row of the position
    embeddings that belongs to the first token."""
    if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("is_decoder"):
        raise UnsupportedModel(
            "config fields position_embedding_type and is_decoder: only an encoder with absolute "
            "positions is supported"
        )
    num_positions = integer(hf, "max_position_embeddings", minimum=first + 1) - first
    return standard(
        {"hidden_act": "gelu", **hf, "max_position_embeddings": num_positions},
        norms=PRE_NORMS,
        norm_kind="layer",
        norm_bias=True,
        norm_eps=positive(hf, "layer_norm_eps", 1e-12, maximum=1.0),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        tied_head=True,
        layers=(LayerConfig(rope=None),) * num_layers(hf),
        encoder=Encoder(
            LearnedPositions(num_positions, integer(hf, "type_vocab_size", 2), first),
            post_norm=True,
        ),
    )


def stored(config: ModelConfig) -> dict[str, View]:
    return stored_bert(config, PREFIX)


def stored_bert(config: ModelConfig, prefix: str) -> dict[str, View]:
    """Return views that find the model's tensors under BERT's names, without a prefix or with
    `prefix`. The norm behind a layer is the first one of the next layer."""
    modules = {EMBEDDING_NORM: "embeddings.LayerNorm"}
    for n in range(config.num_layers):
        here, there = f"model.layers.{n}.", f"encoder.layer.{n}."
        modules |= {here + name: there + other for name, other in LAYER.items()}
        last = n + 1 == config.num_layers
        after = "model.norm" if last else f"model.layers.{n + 1}.input_layernorm"
        modules[after] = f"{there}output.LayerNorm"
    tensors = {
        f"{name}.{leaf}": View(f"{other}.{leaf}")
        for name, other in modules.items()
        for leaf in ("weight", "bias")
    }
    tensors |= {
        EMBEDDING: View("embeddings.word_embeddings.weight"),
        POSITIONS: View("embeddings.position_embeddings.weight"),
        TYPES: View("embeddings.token_type_embeddings.weight"),
    }
    return {name: first_of(view, View(prefix + view.source)) for name, view in tensors.items()}


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return name.removeprefix(PREFIX).startswith(UNUSED) or name.endswith("position_ids")


SPEC = ModelSpec(("BertModel",), parse, stored=stored, unused=is_unused)
