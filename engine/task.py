"""What a model is served for: text, embeddings or scores, by its files and the options."""

import logging
from dataclasses import dataclass, replace

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError, StoredPooling
from pdserve.engine.checkpoints.text_card import load_tokenizer
from pdserve.engine.models.config import ModelConfig

log = logging.getLogger(__name__)

YES, NO = "yes", "no"  # what a reranker answers (Qwen3-Reranker)
CAUSAL = {"is_causal": False, "use_bidirectional_attention": True}  # what says that it is not


@dataclass(frozen=True, slots=True)
class ModelTask:
    """What a model is for; without pooling and score ids it generates."""

    pooling: StoredPooling | None = None  # of an embedding model
    scores: bool = False

    @property
    def kind(self) -> str:
        """How an embedding is pooled; empty: there are none."""
        return self.pooling.kind if self.pooling else ""

    def of(self, model: ModelConfig) -> ModelConfig:
        """The model as this needs it. An embedding needs no head: that of the table costs nothing
        in its place, and a stored one is not loaded. A text is as long as the files allow."""
        if self.pooling is None:
            return model
        most = min(model.context_len, self.pooling.max_len or model.context_len)
        return replace(model, tied_head=True, head_bias=False, context_len=most)


def find_task(config: EngineConfig, checkpoint: Checkpoint, has_head: bool) -> ModelTask:
    """`has_head`: the model can make logits. Raises ValueError for options that contradict each
    other, CheckpointError for a model that cannot do what it is asked for."""
    for field, value in CAUSAL.items():
        if checkpoint.hf_config.get(field) is value:
            raise CheckpointError(f"config field {field}={value}: attention must be causal")
    asked = config.task
    if config.pooling != "auto":
        if asked not in ("auto", "embed"):
            raise ValueError(f"--pooling {config.pooling} contradicts --task {asked}")
        asked = "embed"
    if asked in ("generate", "score"):
        if not has_head:
            raise CheckpointError(f"--task {asked}: the model has no head, it can only embed")
        return ModelTask(scores=asked == "score")
    stored = _stored_pooling(config, checkpoint)
    if asked == "auto" and stored is None and has_head:
        return ModelTask()
    # Vectors of a model whose files say nothing are normalized, as vLLM does.
    stored = stored or StoredPooling("last", normalizes=True)
    if config.pooling != "auto":
        stored = replace(stored, kind=config.pooling)
    return ModelTask(stored)


def _stored_pooling(config: EngineConfig, checkpoint: Checkpoint) -> StoredPooling | None:
    try:
        return checkpoint.pooling()
    except CheckpointError as error:
        if config.pooling == "auto":
            raise
        log.warning("--pooling stands in for what the files say: %s", error)
        return None


def score_ids(tokenizer_json: bytes) -> tuple[int, int]:
    """The tokens that say yes and no. Raises CheckpointError if the vocabulary lacks one."""
    tokenizer = load_tokenizer(tokenizer_json)
    yes, no = tokenizer.token_to_id(YES), tokenizer.token_to_id(NO)
    if yes is None or no is None:
        raise CheckpointError(f"--task score: the vocabulary has no tokens {YES!r} and {NO!r}")
    return yes, no
