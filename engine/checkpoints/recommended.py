"""Sampling that the authors of a model recommend where its files do not say so. Pure.

A row names its source, and has a reason: GGUF files have no generation_config.json, and some
folders have one without sampling.
"""

import re
from collections.abc import Mapping
from typing import Any

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# A name of the model matches the first pattern that it contains.
RECOMMENDED: tuple[tuple[str, dict[str, float]], ...] = (
    # The example of the model card: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    (r"SmolLM2-.*Instruct", {"temperature": 0.2, "top_p": 0.9}),
)


def with_recommended(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The generation config of the model of that name; what its own files say of sampling stays."""
    if any(config.get(key) is not None for key in SAMPLING):
        return dict(config)
    for pattern, sampling in RECOMMENDED:
        if re.search(pattern, name, re.IGNORECASE):
            return {**config, **sampling}
    return dict(config)
