"""The description of an architecture for the rest of the engine: how to read its config.json, and
the names of its tensors in checkpoints. The modules of engine/architectures define the
descriptions.

The text model inside a multimodal checkpoint is a separate architecture (`text_of`). Its config is
config.json's `text_config`, and its tensors have another prefix. The vision towers and projectors
of the checkpoint are not loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pdserve.engine.checkpoints import Checkpoint, View, ViewedCheckpoint, first_of
from pdserve.engine.checkpoints.gguf import GgufMapping
from pdserve.engine.models.classifier import CLASSIFIER_OUT, Classifier
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.hf_config import HfConfig, has_sigmoid, table
from pdserve.engine.models.layer import EMBEDDING, tensor_shapes

PREFIX = "model."  # of all tensors except the head


def own_names(config: ModelConfig) -> Mapping[str, View]:
    """Return no views: the default for checkpoints that store tensors under the names of
    layer.py."""
    return {}


def none_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    """Return False: the default for checkpoints in which the model uses every tensor."""
    return False


def is_mtp(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor belongs to the extra layers of multi-token prediction (MTP), which
    are not used."""
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return not prefix and number.isdigit() and int(number) >= config.num_layers


def under_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view of a checkpoint that was saved without a head, with "model." put before its
    tensor names, as in models with a head; return any other checkpoint unchanged."""
    if EMBEDDING.removeprefix(PREFIX) not in checkpoint.names():
        return checkpoint
    return ViewedCheckpoint(checkpoint, {f"{PREFIX}{n}": View(n) for n in checkpoint.names()})


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: how to parse its config.json, its names in GGUF, the views of tensors that
    its checkpoints store under other names, and the tensors that the model does not use."""

    architectures: tuple[str, ...]  # Hugging Face class names ("LlamaForCausalLM")
    parse: Callable[[Mapping[str, Any]], ModelConfig]  # raises UnsupportedModel
    gguf: GgufMapping | None = None
    stored: Callable[[ModelConfig], Mapping[str, View]] = own_names
    unused: Callable[[ModelConfig, Checkpoint, str], bool] = none_unused

    def view(self, checkpoint: Checkpoint, config: ModelConfig) -> ViewedCheckpoint:
        """Return the checkpoint with its tensors under the names that the model loads."""
        unused = partial(self.unused, config, checkpoint)
        return ViewedCheckpoint(checkpoint, self.stored(config), unused)


def scorer_of(architecture: str, decoder: ModelSpec) -> ModelSpec:
    """Return the spec of a decoder with a head that makes a score from the state of the last
    token."""

    def parse(hf: HfConfig) -> ModelConfig:
        """Parse the config of a decoder with a head that scores pairs of texts."""
        head = Classifier("last", bias=False, sigmoid=has_sigmoid(hf))
        return replace(decoder.parse(hf), classifier=head, tied_head=True, head_bias=False)

    def stored(config: ModelConfig) -> dict[str, View]:
        return {**decoder.stored(config), f"{CLASSIFIER_OUT}.weight": View("score.weight")}

    return ModelSpec((architecture,), parse, stored=stored, unused=decoder.unused)


# Prefixes of a text model's tensors in transformers, before and since its version 4.52.
PREFIXES = {"model.": ("language_model.model.", "model.language_model."), "": ("language_model.",)}
UNUSED_PREFIXES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector", "audio_tower", "visual")
)


@dataclass(frozen=True, slots=True)
class TextModel:
    """A text model inside a multimodal one."""

    model_type: str  # of `text_config`
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    defaults: Mapping[str, Any]  # transformers' values of the fields that `text_config` may omit


def text_of(
    architecture: str, *models: TextModel, flat: bool = False, gguf: GgufMapping | None = None
) -> ModelSpec:
    """Return the spec of the multimodal `architecture`, of which only the text model is used: the
    one of `models` that the `model_type` of the field `text_config` names. If `flat`, a config
    without `text_config` has the fields of the first of `models`: one of the first releases, or
    from a GGUF file."""
    by_type = {model.model_type: model for model in models}

    def parse(hf: HfConfig) -> ModelConfig:
        text = dict(table(hf, "text_config"))
        if flat and not text:
            text = {**hf, "model_type": models[0].model_type}
        model = by_type.get(str(text.get("model_type")))
        if model is None:
            raise UnsupportedModel(
                f"text model of {architecture} is {text.get('model_type')!r}: "
                f"expected {' or '.join(by_type)}"
            )
        outer = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        text = {**model.defaults, **outer, **text, "architectures": [architecture]}
        return model.parse(text)

    return ModelSpec((architecture,), parse, gguf, text_views, is_unused)


def text_views(config: ModelConfig) -> dict[str, View]:
    """Return views that find the text model's tensors under the first of the known prefixes that a
    multimodal checkpoint has."""
    views: dict[str, View] = {}
    for name in tensor_shapes(config):
        model_prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        views[name] = first_of(
            *(View(p + name.removeprefix(model_prefix)) for p in PREFIXES[model_prefix])
        )
    return views


def is_unused(config: ModelConfig, checkpoint: Checkpoint, name: str) -> bool:
    return name.startswith(UNUSED_PREFIXES)
