"""The model of the chaos runs: few operations per token, and much KV, so that transfers
take time.
"""

from pathlib import Path

from builders.tiny_models import write_tiny


def write_chaos_model(folder: Path) -> Path:
    """Write a model with 8 heads of 64 in two layers: 4 KiB of KV per token; a context of 2,048."""
    return write_tiny(
        folder / "tiny",
        "llama",
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
    )
