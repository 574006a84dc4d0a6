"""The text model inside a multimodal checkpoint, as a separate architecture.

Its config is config.json's `text_config`. Its tensors have another prefix; the vision towers and
projectors beside them are not loaded.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.engine.checkpoints import View, first_of
from pdserve.engine.models.config import ModelConfig, UnsupportedModel
from pdserve.engine.models.hf_config import HfConfig, table
from pdserve.engine.models.layer import tensor_shapes
from pdserve.engine.models.spec import ModelSpec

# Prefixes of a text model's tensors in transformers, before and since its version 4.52.
PREFIXES = {"model.": ("language_model.model.", "model.language_model."), "": ("language_model.",)}
UNUSED_PREFIXES = tuple(
    f"{prefix}{part}."
    for prefix in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector", "audio_tower")
)


def text_of(
    architecture: str, spec: ModelSpec, model_type: str, defaults: Mapping[str, Any]
) -> ModelSpec:
    """Return the spec of `architecture`, whose text model is that of `spec`.

    `text_config` must state `model_type`; `defaults` are the fields that it may omit, with
    transformers' values.
    """

    def parse(hf: HfConfig) -> ModelConfig:
        text = dict(table(hf, "text_config"))
        if text.get("model_type") != model_type:
            raise UnsupportedModel(
                f"text model of {architecture} is {text.get('model_type')!r}: expected {model_type}"
            )
        outer = {key: hf[key] for key in ("tie_word_embeddings",) if key in hf}
        text = {**defaults, **outer, **text, "architectures": list(spec.architectures)}
        return replace(spec.parse(text), architecture=architecture)

    return ModelSpec((architecture,), parse, stored=text_views, unused=is_unused)


def text_views(config: ModelConfig) -> dict[str, View]:
    """Return views of the model's tensors under the first of their prefixes that the checkpoint
    has."""
    views: dict[str, View] = {}
    for name in tensor_shapes(config):
        model_prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        views[name] = first_of(
            *(View(p + name.removeprefix(model_prefix)) for p in PREFIXES[model_prefix])
        )
    return views


def is_unused(config: ModelConfig, name: str) -> bool:
    return name.startswith(UNUSED_PREFIXES)
