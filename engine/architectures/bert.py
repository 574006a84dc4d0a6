"""BERT: an encoder with learned positions and layer norms on the residual stream
(arXiv:1810.04805)."""

from collections.abc import Mapping
from dataclasses import replace

from pdserve.engine.checkpoints import Checkpoint, View, first_of
from pdserve.engine.checkpoints.gguf import GgufMapping, encoder_config
from pdserve.engine.models import (
    CLASSIFIER_DENSE,
    CLASSIFIER_OUT,
    EMBEDDING,
    EMBEDDING_NORM,
    POSITIONS,
    PRE_NORMS,
    TYPES,
    Classifier,
    Encoder,
    LayerConfig,
    LearnedPositions,
    ModelConfig,
    ModelSpec,
    UnsupportedModel,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    has_sigmoid,
    integer,
    layer_norms,
    num_layers,
    standard,
)

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
EARLY = {"weight": "gamma", "bias": "beta"}  # names of a norm's tensors in early checkpoints
ROWS = (TYPES, f"{CLASSIFIER_OUT}.weight")  # early GGUF files have a matrix of one row as a vector
UNUSED = ("pooler.", "cls.", "lm_head.")  # heads


def parse(hf: HfConfig) -> ModelConfig:
    return parse_bert(hf)


def parse_scorer(hf: HfConfig) -> ModelConfig:
    """Parse the config of BERT with a head that scores pairs of texts."""
    config = parse(hf)
    if config.positions is None or not config.positions.num_types:
        raise UnsupportedModel(
            "config field type_vocab_size=0: a head without token types is that of DistilBERT, "
            "whose activation is not supported"
        )
    head = Classifier("cls", activation="tanh", sigmoid=has_sigmoid(hf))
    return replace(config, classifier=head)


def parse_bert(hf: HfConfig, padding: int | None = None) -> ModelConfig:
    """Parse the config of BERT or of a model with its layers. `padding`: the id of padding in a
    model whose positions begin after it (see LearnedPositions)."""
    if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("is_decoder"):
        raise UnsupportedModel(
            "config fields position_embedding_type and is_decoder: only an encoder with absolute "
            "positions is supported"
        )
    unused = 0 if padding is None else padding + 1
    num_positions = integer(hf, "max_position_embeddings", minimum=unused + 1) - unused
    return standard(
        {"hidden_act": "gelu", **hf, "max_position_embeddings": num_positions},
        norms=PRE_NORMS,
        **layer_norms({"layer_norm_eps": 1e-12, **hf}),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        tied_head=True,
        layers=(LayerConfig(rope=None),) * num_layers(hf),
        positions=LearnedPositions(
            num_positions, integer(hf, "type_vocab_size", 2, minimum=0), padding
        ),
        encoder=Encoder(post_norm=True),
    )


def stored(config: ModelConfig) -> dict[str, View]:
    head = {CLASSIFIER_DENSE: "pooler.dense", CLASSIFIER_OUT: "classifier"}
    return stored_bert(config, PREFIX, head)


def stored_bert(config: ModelConfig, prefix: str, head: Mapping[str, str]) -> dict[str, View]:
    """Return views that find the model's tensors under BERT's names, without a prefix or with
    `prefix`. The norm after a layer is the first one of the next layer. `head`: the modules of a
    classification head."""
    modules = {EMBEDDING_NORM: "embeddings.LayerNorm", **(head if config.classifier else {})}
    for n in range(config.num_layers):
        here, there = f"model.layers.{n}.", f"encoder.layer.{n}."
        modules |= {here + name: there + other for name, other in LAYER.items()}
        last = n + 1 == config.num_layers
        after = "model.norm" if last else f"model.layers.{n + 1}.input_layernorm"
        modules[after] = f"{there}output.LayerNorm"
    tensors: dict[str, tuple[str, ...]] = {
        f"{name}.{leaf}": (f"{other}.{leaf}", f"{other}.{early}")
        for name, other in modules.items()
        for leaf, early in EARLY.items()
    }
    tensors |= {
        EMBEDDING: ("embeddings.word_embeddings.weight",),
        POSITIONS: ("embeddings.position_embeddings.weight",),
        TYPES: ("embeddings.token_type_embeddings.weight",),
    }
    return {
        name: first_of(
            *(
                View(start + source, is_row=name in ROWS)
                for source in sources
                for start in ("", prefix)
            )
        )
        for name, sources in tensors.items()
    }


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return is_unused_bert(config, name.removeprefix(PREFIX))


def is_unused_bert(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor, by its name without prefix, is a buffer or of an unused head."""
    if config.classifier and name.startswith("pooler."):
        return False
    return name.startswith(UNUSED) or name.endswith("position_ids")


# Files of RoBERTa and XLM-RoBERTa have this name too: their positions begin with the first row.
GGUF = GgufMapping(
    "bert",
    tensors={
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "blk.{n}.attn_output_norm": "encoder.layer.{n}.attention.output.LayerNorm",
        "blk.{n}.layer_output_norm": "encoder.layer.{n}.output.LayerNorm",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    },
    config=encoder_config,
    scorer="BertForSequenceClassification",
)
SCORER = ModelSpec(
    ("BertForSequenceClassification",), parse_scorer, stored=stored, unused=is_unused
)
SPEC = ModelSpec(("BertModel",), parse, GGUF, stored, is_unused)
