"""The model card: the properties of a model that other processes need. Plain data, no torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CardData:
    """A loaded model's properties; `weights_digest` and `quantization` describe its weights."""

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
    pooling: str = ""  # embedding models: "last" or "mean"; empty: a generative model
    normalizes: bool = False  # embeddings have length 1
    hidden_size: int = 0
    score_ids: tuple[int, ...] = ()  # rerankers: the ids of the tokens yes and no
