"""A model's card: what other processes must know about it. Plain data, no torch."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CardData:
    """Describes a loaded model; `weights_digest` and `quantization` say what its weights are."""

    name: str  # as clients write it
    architecture: str  # Hugging Face class name
    context_len: int  # tokens, prompt and answer together
    vocab_size: int
    eos_ids: tuple[int, ...]  # any ends an answer; the first is the tokenizer's own eos token
    bos_id: int | None
    adds_bos: bool  # the tokenizer puts bos_id before a prompt
    tokenizer_json: bytes
    chat_template: str  # empty: the model has none
    weights_digest: str  # hex; Merkle root over the tensors' SHA-256
    quantization: str  # dominant format by bytes, e.g. "Q4_1", "bf16"
    created: int  # unix seconds, of the weights file
    weights_bytes: int  # on disk
    generation_config: dict[str, Any] = field(default_factory=dict)
    config_digest: str = ""  # hex; what the checkpoint says of rope, norms and windows
    pooling: str = ""  # of an embedding model: "last" or "mean"; empty: it generates
    normalizes: bool = False  # its embeddings have length 1
    hidden_size: int = 0
    score_ids: tuple[int, ...] = ()  # of a reranker: the tokens that say yes and no
