"""Reads and writes GGUF files."""

from pdserve.engine.checkpoints.gguf.checkpoint import GgufCheckpoint
from pdserve.engine.checkpoints.gguf.config import (
    GROUPED,
    SCORES,
    expert_config,
    one_number,
    rope_scaling,
)
from pdserve.engine.checkpoints.gguf.files import shard_names
from pdserve.engine.checkpoints.gguf.mapping import GgufMapping, Metadata
from pdserve.engine.checkpoints.gguf.writer import quantize_gguf
