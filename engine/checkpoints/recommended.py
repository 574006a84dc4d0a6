"""Sampling that the authors of a model recommend where its files do not say so.

GGUF files have no generation_config.json, and some folders have one without sampling. The values
are those of the authors' generation_config.json, or of the model card's example (SmolLM2). Pure.
"""

import re
from collections.abc import Mapping
from typing import Any

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

# A name of the model matches the first pattern that it contains.
RECOMMENDED: tuple[tuple[str, dict[str, float]], ...] = (
    (r"SmolLM2-.*Instruct", {"temperature": 0.2, "top_p": 0.9}),
    (r"Qwen3-.*Instruct", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    (r"Qwen3-(?!Embedding|Reranker|.*Base)", {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    (r"Qwen2\.5-.*Instruct", {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    (r"DeepSeek-R1-Distill", {"temperature": 0.6, "top_p": 0.95}),
    (r"Llama-3(\.\d)?-.*Instruct", {"temperature": 0.6, "top_p": 0.9}),
    (r"gemma-3-.*-it", {"temperature": 1.0, "top_p": 0.95, "top_k": 64}),
)


def with_recommended(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The generation config of the model of that name; what its own files say of sampling stays."""
    if any(config.get(key) is not None for key in SAMPLING):
        return dict(config)
    for pattern, sampling in RECOMMENDED:
        if re.search(pattern, name, re.IGNORECASE):
            return {**config, **sampling}
    return dict(config)
