"""Reads the sampling defaults that a model's authors recommend from generation_config.json."""

import json
import logging
import math
from dataclasses import dataclass, fields
from typing import Any

from pdserve.engine.api import BOUNDS
from pdserve.text.errors import UnsupportedTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults for params that a request omits; None if the file omits them too.

    max_tokens comes only from pdserve's own recommendations (engine/checkpoints/card.py). The
    max_new_tokens and max_length of model files are ignored: the default is the rest of the
    context. do_sample is ignored because files leave it at false beside a recommended temperature.
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


def _number(config: dict[str, Any], name: str) -> Any:
    kind: type = int if name in ("top_k", "max_tokens") else float
    value, allowed = config[name], BOUNDS[name].api
    if value is None:
        return None
    is_int = isinstance(value, int) and not isinstance(value, bool)
    fits = is_int or (kind is float and isinstance(value, float) and math.isfinite(value))
    if not fits or not allowed.has(value):
        logger.warning(
            "generation_config.json: ignoring %s, because its value %.40r is invalid", name, value
        )
        return None
    return max(value, 0) if kind is int else float(value)
