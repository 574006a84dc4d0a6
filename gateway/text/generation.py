"""Sampling defaults that a model's authors recommend: generation_config.json, read once."""

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from pdserve.engine.api.sampling_bounds import BOUNDS
from pdserve.gateway.text.errors import UnsupportedTokenizer

logger = logging.getLogger(__name__)

_KINDS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Used where a request says nothing; None: the file says nothing either.

    The file's max_new_tokens and max_length are ignored: the default is what is left of the
    context. So is do_sample, which files leave at false beside a recommended temperature.
    """

    temperature: float | None = None
    top_k: int | None = None  # 0: all
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def from_json(cls, data: bytes | str) -> "GenerationDefaults":
        """From the text of generation_config.json; empty text gives no defaults.

        A value that no client could ask for is left out with a warning, so that it does not take
        the model down.
        Raises UnsupportedTokenizer if the text is not a JSON object.
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
        return cls(**{name: _number(config, name) for name in _KINDS if name in config})


def _number(config: dict[str, Any], name: str) -> Any:
    kind, allowed = _KINDS[name], BOUNDS[name].api
    value = config[name]
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = whole or (kind is float and isinstance(value, float) and math.isfinite(value))
    if not fits or not allowed.has(value):
        logger.warning("generation_config.json: %s = %.40r is ignored", name, value)
        return None
    return max(value, 0) if kind is int else float(value)
