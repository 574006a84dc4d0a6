"""The supported architectures. Each is a ModelSpec in a module of this package, found by discovery;
a module elsewhere calls `register`."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from pdserve.engine.models import ModelConfig, ModelSpec, UnsupportedModel

HEAD_SUFFIX = "ForCausalLM"  # suffix of class names; class names without a head end in "Model"
_specs: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Add an architecture to the supported ones. Raises ValueError if one of its names belongs to
    another architecture."""
    for name in spec.architectures:
        if name in _specs and _specs[name] != spec:
            raise ValueError(f"architecture {name} is registered twice, by different model specs")
    _specs.update(dict.fromkeys(spec.architectures, spec))


@cache
def _discover() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for spec in vars(import_module(module.name)).values():
            if isinstance(spec, ModelSpec):
                register(spec)


def known_specs() -> tuple[ModelSpec, ...]:
    """Return every registered architecture once, in order of its first name."""
    _discover()
    specs = {spec.architectures[0]: spec for spec in _specs.values()}
    return tuple(specs[name] for name in sorted(specs))


def find_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the architecture that a config.json names. Raises UnsupportedModel, which
    lists the supported names, if it names none of them."""
    _discover()
    architectures = hf_config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list | tuple) else []
    for name in names:
        for candidate in (name, *(f"{stem}{HEAD_SUFFIX}" for stem in _without_head(name))):
            if candidate in _specs:
                return _specs[candidate]
    listed = ", ".join(names) or "config.json names none"
    raise UnsupportedModel(f"unknown architecture ({listed}); known: {', '.join(sorted(_specs))}")


def _without_head(name: str) -> list[str]:
    """Return the names to try for the class name of a model without a head: "Qwen3" for
    "Qwen3Model", "Gemma3Text" and "Gemma3" for "Gemma3TextModel"; none for other names."""
    return [name.removesuffix(end) for end in ("Model", "TextModel") if name.endswith(end)]


def parse_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Parse config.json into a ModelConfig, as the architecture that it names requires. Raises
    UnsupportedModel."""
    return find_spec(hf_config).parse(hf_config)
