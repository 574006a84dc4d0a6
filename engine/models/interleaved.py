"""Views of checkpoints whose rope rotates neighbouring dims of a head: here, the two dims of a pair
are half of the rotated dims apart, so the rows of q and k are reordered."""

from pdserve.engine.checkpoints import RopeRows, View
from pdserve.engine.models.config import ModelConfig


def interleaved_rope(config: ModelConfig) -> dict[str, View]:
    """Return views of q and k with reordered rows, for each layer that has rope."""
    views: dict[str, View] = {}
    for n, layer in enumerate(config.layers):
        if layer.rope is None:
            continue
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            rows = RopeRows(heads, config.head_dim, layer.rope.rotary_dim)
            for leaf in ("weight", "bias"):
                tensor = f"model.layers.{n}.self_attn.{name}.{leaf}"
                views[tensor] = View(tensor, rows)
    return views
