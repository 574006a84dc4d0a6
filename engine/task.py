"""Selects a model's task (generation, embeddings or scores) from its files and the options."""

import logging
from dataclasses import dataclass, replace

from pdserve.engine.api.config import EngineConfig
from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError, StoredPooling
from pdserve.engine.checkpoints.text_card import load_tokenizer
from pdserve.engine.models.config import ModelConfig

log = logging.getLogger(__name__)

YES, NO = "yes", "no"  # answers of a reranker (Qwen3-Reranker)
CAUSAL = {"is_causal": False, "use_bidirectional_attention": True}  # fields of non-causal models


@dataclass(frozen=True, slots=True)
class ModelTask:
    """Task of a model; without pooling and scores it generates text."""

    pooling: StoredPooling | None = None  # set for an embedding model
    scores: bool = False

    @property
    def kind(self) -> str:
        """Pooling kind of the embeddings; empty if the model makes none."""
        return self.pooling.kind if self.pooling else ""

    def of(self, model: ModelConfig) -> ModelConfig:
        """Return the model config for this task.

        An embedding model needs no head: a head tied to the embedding table costs nothing, and a
        stored head is not loaded. The context is at most the maximum length in the pooling files.
        """
        if self.pooling is None:
            return model
        max_len = min(model.context_len, self.pooling.max_len or model.context_len)
        return replace(model, tied_head=True, head_bias=False, context_len=max_len)


def find_task(config: EngineConfig, checkpoint: Checkpoint, has_head: bool) -> ModelTask:
    """Return the task; `has_head` says whether the model can compute logits.

    Raises ValueError for options that contradict each other, and CheckpointError for a model that
    cannot do the task.
    """
    for field, value in CAUSAL.items():
        if checkpoint.hf_config.get(field) is value:
            raise CheckpointError(
                f"config field {field}={value} is not supported: attention must be causal"
            )
    task = config.task
    if config.pooling != "auto":
        if task not in ("auto", "embed"):
            raise ValueError(f"--pooling {config.pooling} contradicts --task {task}")
        task = "embed"
    if task in ("generate", "score"):
        if not has_head:
            raise CheckpointError(f"--task {task}: the model has no output head and can only embed")
        return ModelTask(scores=task == "score")
    stored = _stored_pooling(config, checkpoint)
    if task == "auto" and stored is None and has_head:
        return ModelTask()
    # Like vLLM, normalize the vectors of a model whose files do not say.
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
        log.warning(
            "--pooling replaces the model's pooling settings, which cannot be used: %s", error
        )
        return None


def score_ids(tokenizer_json: bytes) -> tuple[int, int]:
    """Return the ids of the tokens `yes` and `no`. Raises CheckpointError if the vocabulary lacks
    one."""
    tokenizer = load_tokenizer(tokenizer_json)
    yes, no = tokenizer.token_to_id(YES), tokenizer.token_to_id(NO)
    if yes is None or no is None:
        raise CheckpointError(
            f"--task score: the vocabulary must have the tokens {YES!r} and {NO!r}"
        )
    return yes, no
