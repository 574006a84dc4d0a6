"""ModernBERT: an encoder with rope, norms before attention and feed-forward, a gated feed-forward,
and a window on two of three layers (arXiv:2412.13663)."""

from dataclasses import replace
from typing import Any

from pdserve.engine.checkpoints import Checkpoint, View, first_of, fused
from pdserve.engine.checkpoints.gguf import (
    GgufMapping,
    Metadata,
    encoder_config,
    one_number,
    window_config,
)
from pdserve.engine.models import (
    CLASSIFIER_DENSE,
    CLASSIFIER_NORM,
    CLASSIFIER_OUT,
    EMBEDDING,
    EMBEDDING_NORM,
    PRE_NORMS,
    Classifier,
    Encoder,
    LayerConfig,
    ModelConfig,
    ModelSpec,
    UnsupportedModel,
    qkv_sizes,
)
from pdserve.engine.models.hf_config import (
    HfConfig,
    has_sigmoid,
    head_dim,
    integer,
    num_layers,
    positive,
    read_rope,
    standard,
    windowed,
)

PREFIX = "model."  # of checkpoints that were saved with a head
UNUSED = ("head.", "decoder.")
POOLING = {1: "mean", 2: "cls"}  # values of a GGUF file's classifier.pooling_type
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn.Wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "mlp.Wo",
}


def parse(hf: HfConfig) -> ModelConfig:
    every = integer(hf, "global_attn_every_n_layers", 3)
    has_window = windowed(hf, [n % every > 0 for n in range(num_layers(hf))])
    window = integer(hf, "local_attention", 128) // 2 + 1
    size = head_dim(hf)
    layers = {
        True: LayerConfig(
            read_rope(hf, size, "sliding_attention", "local_rope_theta", 10_000.0), window
        ),
        False: LayerConfig(read_rope(hf, size, "full_attention", "global_rope_theta", 160_000.0)),
    }
    bias = bool(hf.get("attention_bias", False))
    return standard(
        {"hidden_activation": "gelu", **hf},
        norms=PRE_NORMS,
        norm_kind="layer",
        norm_bias=bool(hf.get("norm_bias", False)),
        norm_eps=positive(hf, "norm_eps", 1e-5, maximum=1.0),
        qkv_bias=bias,
        o_bias=bias,
        ffn_bias=bool(hf.get("mlp_bias", False)),
        tied_head=True,
        layers=tuple(layers[has] for has in has_window),
        encoder=Encoder(),
    )


def parse_scorer(hf: HfConfig) -> ModelConfig:
    """Parse the config of ModernBERT with a head that scores pairs of texts."""
    config = parse(hf)
    activation = hf.get("classifier_activation") or "gelu"
    pooling = hf.get("classifier_pooling") or "cls"
    if activation != "gelu" or pooling not in ("cls", "mean"):
        raise UnsupportedModel(
            f"config fields classifier_activation={activation!r}, classifier_pooling={pooling!r}: "
            "expected gelu, and cls or mean"
        )
    head = Classifier(
        "cls" if pooling == "cls" else "mean",
        "gelu",
        dense_bias=bool(hf.get("classifier_bias", False)),
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        sigmoid=has_sigmoid(hf),
    )
    return replace(config, classifier=head)


def stored(config: ModelConfig) -> dict[str, View]:
    """Return views that find the model's tensors under ModernBERT's names. One tensor has q, k and
    v, another the gate and what it multiplies."""
    modules = {EMBEDDING_NORM: "embeddings.norm", "model.norm": "final_norm"}
    views: dict[str, View] = {}
    mlp = {"gate_proj": config.ffn_size, "up_proj": config.ffn_size}
    for n in range(config.num_layers):
        here, there = f"model.layers.{n}.", f"layers.{n}."
        modules |= {here + name: there + other for name, other in NAMES.items()}
        for module, other, parts in (
            ("self_attn.", f"{there}attn.Wqkv", qkv_sizes(config)),
            ("mlp.", f"{there}mlp.Wi", mlp),
        ):
            for name, view in fused("", other, parts).items():
                views[f"{here}{module}{name}"] = view
    if config.classifier:
        modules |= {CLASSIFIER_DENSE: "head.dense", CLASSIFIER_NORM: "head.norm"}
        modules[CLASSIFIER_OUT] = "classifier"
    for name, other in modules.items():
        row = name == CLASSIFIER_OUT  # GGUF files may have its one row as a vector
        views |= {
            f"{name}.{leaf}": View(f"{other}.{leaf}", is_row=row and leaf == "weight")
            for leaf in ("weight", "bias")
        }
    views[EMBEDDING] = View("embeddings.tok_embeddings.weight")
    return {
        name: first_of(view, replace(view, source=PREFIX + view.source))
        for name, view in views.items()
    }


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return config.classifier is None and name.startswith(UNUSED)


def gguf_config(metadata: Metadata) -> dict[str, Any]:
    """Return the config entries that the usual names of a GGUF file do not give. A missing value is
    that of llama.cpp."""
    arch = metadata["general.architecture"]
    window = window_config(metadata)
    pooling = metadata.get(f"{arch}.classifier.pooling_type", 1)
    # A file of a config without layer_norm_eps has the epsilon under the name of RMS norms alone.
    epsilons = [f"{arch}.attention.layer_norm_{name}" for name in ("epsilon", "rms_epsilon")]
    epsilon = next((key for key in epsilons if key in metadata), epsilons[0])
    config: dict[str, Any] = {
        **encoder_config(metadata),
        "norm_eps": one_number(metadata, epsilon),
        "hidden_activation": metadata.get(f"{arch}.hidden_activation", "gelu"),
        "local_rope_theta": metadata.get(f"{arch}.rope.freq_base_swa"),
        "global_rope_theta": metadata.get(f"{arch}.rope.freq_base", 10_000.0),
        "local_attention": window.get("sliding_window"),
        "global_attn_every_n_layers": window.get("sliding_window_pattern"),
        "layer_types": window.get("layer_types"),
        "classifier_pooling": POOLING.get(pooling, pooling),
    }
    if "sliding_window" not in window:
        config["global_attn_every_n_layers"] = 1
    return config


# ModernBERT's converter writes no biases.
GGUF = GgufMapping(
    "modern-bert",
    tensors={
        "token_embd_norm": "embeddings.norm",
        "blk.{n}.attn_qkv": "layers.{n}.attn.Wqkv",
        "blk.{n}.ffn_up": "layers.{n}.mlp.Wi",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    config=gguf_config,
    scorer="ModernBertForSequenceClassification",
)
SCORER = ModelSpec(
    ("ModernBertForSequenceClassification",), parse_scorer, stored=stored, unused=is_unused
)
SPEC = ModelSpec(("ModernBertModel",), parse, GGUF, stored, is_unused)
