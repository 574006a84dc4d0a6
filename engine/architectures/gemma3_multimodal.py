"""Gemma 3 with a vision tower (4B and larger); only the text part is served."""

from pdserve.engine.architectures.gemma3 import SPEC as TEXT
from pdserve.engine.models.text_of import text_of

DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
SPEC = text_of("Gemma3ForConditionalGeneration", TEXT, "gemma3_text", DEFAULTS)
