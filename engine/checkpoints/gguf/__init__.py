"""Reads and writes GGUF files."""

from pdserve.engine.checkpoints.gguf.checkpoint import GgufCheckpoint
from pdserve.engine.checkpoints.gguf.mapping import (
    GROUPED,
    SCORES,
    GgufMapping,
    Metadata,
    encoder_config,
    expert_config,
    one_number,
    rope_scaling,
    window_config,
)
from pdserve.engine.checkpoints.gguf.reader import shard_names
from pdserve.engine.checkpoints.gguf.writer import quantize_gguf
