"""The architectures: each is a ModelSpec in a module here, found by discovery; a module elsewhere
calls `register`."""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from pdserve.engine.models import ModelConfig, ModelSpec, UnsupportedModel

HEAD_SUFFIX = "ForCausalLM"  # suffix of class names; class names without a head end in "Model"
_specs: dict[str, ModelSpec] = {}


def register(spec: ModelSpec) -> None:
    """Make an architecture known. Raises ValueError if one of its names is taken."""
    for name in spec.architectures:
        if name in _specs and _specs[name] != spec:
            raise ValueError(f"architecture {name} is registered twice")
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
    """Return the spec of a config.json. Raises UnsupportedModel, which lists the known names."""
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
    """Return the stems of a class name without a head: "Qwen3Model", "Gemma3TextModel"."""
    return [name.removesuffix(end) for end in ("Model", "TextModel") if name.endswith(end)]


def parse_config(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Parse config.json into a ModelConfig. Raises UnsupportedModel."""
    return find_spec(hf_config).parse(hf_config)
