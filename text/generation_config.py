"""Sampling defaults: those that a model's authors recommend in generation_config.json, and those of
an operator's config, which has the same form."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pdserve.engine.api import BOUNDS
from pdserve.text.errors import UnsupportedTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for params that a request omits, from the model or the operator; None: the engine's.

    max_tokens comes only from an operator or from pdserve's own recommendations
    (engine/checkpoints/card.py). The max_new_tokens and max_length of model files are ignored: the
    default is the rest of the context. An operator's max_new_tokens is a maximum, not a default
    (OperatorConfig). do_sample is ignored because files leave it at false beside a recommended
    temperature.
    """

    temperature: float | None = None
    top_k: int | None = None  # 0: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    @classmethod
    def from_json(cls, data: bytes | str) -> "GenerationDefaults":
        """Parse the text of generation_config.json; empty text means no defaults.

        Logs a warning and drops a value that a request could not have either, so that the model
        still loads. Raises UnsupportedTokenizer if the text is not a JSON object.
        """
        if not data.strip():
            return cls()
        try:
            config = json.loads(data)
        except ValueError as error:
            raise UnsupportedTokenizer(f"generation_config.json is not JSON: {error}") from None
        except RecursionError:
            raise UnsupportedTokenizer("generation_config.json is nested too deeply") from None
        if not isinstance(config, dict):
            raise UnsupportedTokenizer("generation_config.json is not a JSON object")
        names = (item.name for item in fields(cls) if item.name in config)
        return cls(**{name: _number(config, name) for name in names})


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Defaults for params that a request omits, and the maximum of its max_tokens, which it cannot
    exceed; None: no maximum."""

    defaults: GenerationDefaults = GenerationDefaults()
    max_new_tokens: int | None = None


def operator_config(config: Mapping[str, Any], *, strict: bool = False) -> OperatorConfig:
    """Convert an operator's config. Other names are ignored, as in a model's file, or refused if
    `strict`. Raises ValueError with the reason if a value is invalid or a name is refused."""
    names = [item.name for item in fields(GenerationDefaults)]
    unknown = sorted(config.keys() - {*names, _CAP})
    if strict and unknown:
        known = ", ".join((*names, _CAP))
        raise ValueError(f"unknown name {unknown[0]!r:.60}; known names: {known}")
    for name in (*names, _CAP):
        value = config.get(name)
        if value is not None and not _is_valid(name, value):
            kind = "a whole number" if name in _WHOLE else "a number"
            allowed = BOUNDS[_BOUNDED_AS.get(name, name)].api
            raise ValueError(f"{name} must be {kind} {allowed}, not {value!r:.40}")
    values = {name: _converted(name, config[name]) for name in names if name in config}
    return OperatorConfig(GenerationDefaults(**values), config.get(_CAP))


_CAP = "max_new_tokens"
_WHOLE = ("top_k", "max_tokens", _CAP)
_BOUNDED_AS = {_CAP: "max_tokens"}


def _number(config: dict[str, Any], name: str) -> Any:
    value = config[name]
    if value is not None and not _is_valid(name, value):
        logger.warning(
            "generation_config.json: ignoring %s, because its value %.40r is invalid", name, value
        )
        return None
    return _converted(name, value)


def _is_valid(name: str, value: Any) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_float = isinstance(value, float) and math.isfinite(value) and name not in _WHOLE
    return (is_int or is_float) and BOUNDS[_BOUNDED_AS.get(name, name)].api.has(value)


def _converted(name: str, value: Any) -> Any:
    if value is None:
        return None
    return max(value, 0) if name in _WHOLE else float(value)
