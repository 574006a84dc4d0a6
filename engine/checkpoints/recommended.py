"""Sampling params that a model's authors recommend outside its files. Pure.

Each row names its source. The table is needed because GGUF files have no generation_config.json
and some model directories have one without sampling params.
"""

import re
from collections.abc import Mapping
from typing import Any

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# The first pattern found in the model's name applies.
RECOMMENDED: tuple[tuple[str, dict[str, float]], ...] = (
    # The example of the model card: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    (r"SmolLM2-.*Instruct", {"temperature": 0.2, "top_p": 0.9}),
)


def with_recommended(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the generation config with recommended sampling params, unless it sets any itself."""
    if any(config.get(key) is not None for key in SAMPLING):
        return dict(config)
    for pattern, sampling in RECOMMENDED:
        if re.search(pattern, name, re.IGNORECASE):
            return {**config, **sampling}
    return dict(config)
