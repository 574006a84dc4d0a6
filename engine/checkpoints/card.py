"""The model card: the properties of a model that other processes need, and the sampling params that
its authors recommend. Plain data, no torch.

Each row of the recommended params names its source. The table is needed because GGUF files have no
generation_config.json and some model directories have one without sampling params.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# The first pattern found in the model's name applies.
RECOMMENDED: tuple[tuple[str, dict[str, float]], ...] = (
    # Sampling is that of the example in the model card:
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    # max_tokens is pdserve's: this small model often repeats itself until the context is full.
    (r"SmolLM2-135M-Instruct", {"temperature": 0.2, "top_p": 0.9, "max_tokens": 512}),
    (r"SmolLM2-.*Instruct", {"temperature": 0.2, "top_p": 0.9}),
)


@dataclass(frozen=True, slots=True)
class CardData:
    """The properties of a loaded model that other processes need, such as context length and chat
    template."""

    name: str  # the name that clients use
    architecture: str  # Hugging Face class name
    context_len: int  # tokens, prompt and answer together
    vocab_size: int
    eos_ids: tuple[int, ...]  # each ends an answer; the first is the tokenizer's eos token
    bos_id: int | None
    adds_bos: bool  # the tokenizer puts bos_id before a prompt
    tokenizer_json: bytes
    chat_template: str  # empty: the model has none
    weights_digest: str  # hex; Merkle root over the tensors' SHA-256
    quantization: str  # dominant format by bytes, e.g. "Q4_1", "bf16"
    created: int  # Unix seconds, of the weights file
    weights_bytes: int  # on disk
    generation_config: dict[str, Any] = field(default_factory=dict)
    config_digest: str = ""  # hex; over the checkpoint's settings of rope, norms and windows
    pooling: str = ""  # of a model that only embeds: "last", "mean" or "cls"
    pool: str = ""  # of a generating model that also embeds: "last" or "mean"
    scores_pairs: bool = False  # a head scores pairs; the model neither generates nor embeds
    normalizes: bool = False  # embeddings have length 1
    hidden_size: int = 0
    score_ids: tuple[int, ...] = ()  # rerankers: the ids of the tokens yes and no
    is_encoder: bool = False  # a token sees later tokens too


def with_recommended(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a generation config with the sampling params, and for some the max_tokens, that are
    recommended for the model `name`. If `config` sets any sampling param itself, or none are known,
    return it unchanged."""
    if any(config.get(key) is not None for key in SAMPLING):
        return dict(config)
    for pattern, sampling in RECOMMENDED:
        if re.search(pattern, name, re.IGNORECASE):
            return {**config, **sampling}
    return dict(config)
