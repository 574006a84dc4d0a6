"""Latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): the cache has one vector per token, and
every head's key and value are projections of that vector.

The projections are absorbed: queries are multiplied by the projection of keys and results by that
of values, so that all heads attend over the cached vectors themselves, in prefill and in decode. A
cached vector is [part with rope | latent], the reverse of the order in checkpoints; so is a query
head.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.checkpoints import HeadRows, RopeRows, View
from pdserve.engine.models.parts import (
    Attention,
    HeadLinear,
    Heads,
    Linear,
    Part,
    Rope,
    SliceNorm,
    TensorSpec,
)

if TYPE_CHECKING:
    from pdserve.engine.models.config import ModelConfig

NORM_EPS = 1e-6  # of both norms here, as in transformers, whatever the other norms have


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The settings of latent attention; implements Latent of config.py. Sizes are of one head; each
    comment names the field in config.json."""

    q_rank: int  # q_lora_rank: rank of the queries' product; 0: one full matrix
    kv_rank: int  # kv_lora_rank: values of the latent part
    nope_dim: int  # qk_nope_head_dim: dims of a query without rope
    rope_dim: int  # qk_rope_head_dim: dims with rope of a query, and of the key of all heads
    value_dim: int  # v_head_dim
    interleaved: bool  # checkpoints are for rope over neighbours

    @property
    def kv_dim(self) -> int:
        """Number of values cached per token in each layer."""
        return self.rope_dim + self.kv_rank

    @property
    def q_dim(self) -> int:
        return self.rope_dim + self.nope_dim

    def parts(self, config: "ModelConfig", n: int) -> tuple[Part, ...]:
        layer, attn = config.layers[n], f"model.layers.{n}.self_attn."
        heads, hidden = config.num_heads, config.hidden_size
        all_q = heads * self.q_dim

        def weight(name: str, *shape: int) -> TensorSpec:
            return TensorSpec(f"{attn}{name}.weight", shape)

        kv_a = weight("kv_a_proj_with_mqa", self.kv_dim, hidden)
        kv_norm = weight("kv_a_layernorm", self.kv_rank)
        queries: tuple[Part, ...]
        if self.q_rank:
            queries = (
                Linear((weight("q_a_proj", self.q_rank, hidden), kv_a)),
                SliceNorm(weight("q_a_layernorm", self.q_rank), 0, NORM_EPS),
                HeadLinear(weight("q_b_proj", all_q, self.q_rank), rest=self.kv_dim),
            )
        else:
            queries = (Linear((weight("q_proj", all_q, hidden), kv_a)),)
        rope: tuple[Part, ...] = ()
        if layer.rope:
            q, key = Heads(heads, 0, self.q_dim), Heads(0, 1, self.kv_dim)
            rope = (Rope(q, layer.rope), Rope(key, layer.rope, all_q))
        return (
            *queries,
            SliceNorm(kv_norm, all_q + self.rope_dim, NORM_EPS),
            *rope,
            HeadLinear(
                weight("k_b_proj", heads, self.kv_rank, self.nope_dim), self.rope_dim, self.kv_dim
            ),
            Attention(
                Heads(heads, 1, self.kv_dim),
                config.attn_scale,
                config.attn_soft_cap,
                layer.window,
                latent=self.kv_rank,
            ),
            HeadLinear(weight("v_b_proj", heads, self.value_dim, self.kv_rank)),
        )

    def stored(self, config: "ModelConfig") -> dict[str, View]:
        """Return views that put rope's rows first in each head, which checkpoints store last, and
        that split k_b and v_b, which all formats except GGUF store as one matrix, the k rows of
        each head before its v rows."""
        views: dict[str, View] = {}
        heads, nope = config.num_heads, self.nope_dim
        queries = self._rope_first(heads, nope)
        for n in range(config.num_layers):
            attn = f"model.layers.{n}.self_attn."
            rows = {
                ("q_b_proj" if self.q_rank else "q_proj"): queries,
                "kv_a_proj_with_mqa": self._rope_first(1, self.kv_rank),
            }
            views |= {f"{attn}{m}.weight": View(f"{attn}{m}.weight", r) for m, r in rows.items()}
            kv_b = f"{attn}kv_b_proj.weight"
            key_rows = HeadRows(heads, 0, nope, nope + self.value_dim)
            value_rows = key_rows._replace(begin=nope, end=nope + self.value_dim)
            views[f"{attn}k_b_proj.weight"] = View(kv_b, heads=key_rows, transposed=True)
            views[f"{attn}v_b_proj.weight"] = View(kv_b, heads=value_rows)
        return views

    def _rope_first(self, heads: int, num_others: int) -> RopeRows:
        """Return the reordering that puts rope's rows before the `num_others` other rows of each
        head."""
        return RopeRows(
            heads, num_others + self.rope_dim, self.rope_dim, num_others, self.interleaved
        )
