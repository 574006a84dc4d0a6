"""Mistral Small 3.1 and 3.2: Mistral with a vision tower; only the text part is served."""

from pdserve.engine.architectures.mistral import SPEC as TEXT
from pdserve.engine.models.text_of import text_of

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
SPEC = text_of("Mistral3ForConditionalGeneration", TEXT, "mistral", DEFAULTS)
