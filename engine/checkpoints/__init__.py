"""Reads models from GGUF files and Hugging Face directories; both are presented in Hugging Face's
terms."""

from pdserve.engine.checkpoints.cache import DigestCache, TextCache
from pdserve.engine.checkpoints.card import CardData, with_recommended
from pdserve.engine.checkpoints.resolve import HubModel, Resolved, find
from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError, StoredPooling, TextFiles
from pdserve.engine.checkpoints.tensor_remap import (
    HeadRows,
    Nth,
    RopeRows,
    View,
    ViewedCheckpoint,
    first_of,
    fused,
    renamed,
)
from pdserve.engine.checkpoints.text import load_tokenizer
from pdserve.engine.checkpoints.weight_loader import (
    WeightLoader,
    check_names,
    quantization_label,
    quantized_digest,
)
