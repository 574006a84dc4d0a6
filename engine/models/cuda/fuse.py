"""Fuses neighbouring parts of a model where one kernel launch can compute them together. Pure:
parts in, parts out.

The parts of all layers form one list, so that the sum at the end of a layer and the norm at the
beginning of the next layer are also fused.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.layer import layer_parts
from pdserve.engine.models.parts import (
    Add,
    Attention,
    Gate,
    HeadNorm,
    Heads,
    LayerNorm,
    Linear,
    Norm,
    Part,
    Rope,
    Scale,
    SliceNorm,
)
from pdserve.engine.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class PrepareHeads(Part):
    """A fused part: applies norm and rope to the heads of q and k, which begin at column `begin` of
    x, and stores new keys and values in the KV cache of `layer`. If `layer` is None, nothing is
    stored and all heads stay in x."""

    heads: Heads
    begin: int = 0
    norm: HeadNorm | None = None
    rope: RopeConfig | None = None
    layer: int | None = None
    has_values: bool = True


@dataclass(frozen=True, slots=True)
class Attend(Part):
    """A part that computes attention over the KV cache of `layer`, after PrepareHeads has stored
    this step's keys and values there."""

    attention: Attention
    layer: int


@dataclass(frozen=True, slots=True)
class AddNorm(Part):
    """A fused part: adds x * factor to the residual stream, plus the value that Hold set aside if
    `held`. x becomes the norm of the stream, or the stream itself if `norm` is None."""

    held: bool
    factor: float
    norm: Norm | LayerNorm | None


@dataclass(frozen=True, slots=True)
class SplitLinear(Part):
    """A matrix product that may be left as sums over splits of the columns; the next part adds
    these sums."""

    linear: Linear


def fused_parts(config: ModelConfig) -> list[Part]:
    """Return the parts of all layers in order, fused where one launch can compute several of
    them."""
    layers = ((n, part) for n in range(config.num_layers) for part in layer_parts(config, n))
    parts = list(_fused(list(layers)))
    return [
        SplitLinear(part)
        if isinstance(part, Linear) and isinstance(next_part, Gate | AddNorm)
        else part
        for part, next_part in zip_longest(parts, parts[1:])
    ]


def _fused(parts: Sequence[tuple[int, Part]]) -> Iterator[Part]:
    index = 0
    while index < len(parts):
        _, part = parts[index]
        consumed = 1
        match part:
            case HeadNorm() if _is_of_rows(part):
                yield from _row_norms(part)
            case HeadNorm() | Rope() | Attention():
                fused, consumed = _heads(parts[index : index + 3])
                yield from fused
            case Scale() | Add():
                fused, consumed = _sum(parts[index : index + 3])
                yield from fused
            case _:
                yield part
        index += consumed


def _is_of_rows(norm: HeadNorm) -> bool:
    """Return whether a norm covers all heads of q, or all heads of k, as one row, instead of each
    head."""
    return norm.q.shape[0] != norm.heads.dim or norm.k.shape[0] != norm.heads.dim


def _row_norms(norm: HeadNorm) -> Iterator[Part]:
    assert not norm.offset, "no model with norms over all heads has an offset"
    q_size, kv_size = norm.heads.q * norm.heads.dim, norm.heads.kv * norm.heads.dim
    for weight, begin, size in ((norm.q, 0, q_size), (norm.k, q_size, kv_size)):
        for start in range(begin, begin + size, weight.shape[0]):
            yield SliceNorm(weight, start, norm.eps)


def _heads(parts: Iterable[tuple[int, Part]]) -> tuple[list[Part], int]:
    """Fuse the head norm, rope and attention at the beginning of `parts`. Return the fused parts,
    and how many parts they replace."""
    rest = list(parts)
    norm = rope = None
    consumed = 0
    layer, part = rest[consumed]
    if isinstance(part, HeadNorm):
        norm, consumed = part, consumed + 1
        layer, part = rest[consumed]
    if isinstance(part, Rope):
        rope, consumed = part, consumed + 1
        layer, part = rest[consumed] if consumed < len(rest) else (layer, part)
    heads = norm.heads if norm else rope.heads if rope else None
    if isinstance(part, Attention) and (heads is None or _agrees(part, heads, rope)):
        prepare = PrepareHeads(
            part.heads, 0, norm, rope.config if rope else None, layer, not part.latent
        )
        return [prepare, Attend(part, layer)], consumed + 1
    assert heads is not None
    begin = rope.begin if rope else 0
    return [PrepareHeads(heads, begin, norm, rope.config if rope else None)], consumed


def _agrees(attention: Attention, heads: Heads, rope: Rope | None) -> bool:
    return not attention.latent and attention.heads == heads and not (rope and rope.begin)


def _sum(parts: Sequence[tuple[int, Part]]) -> tuple[list[Part], int]:
    """Fuse the scale, sum and norm at the beginning of `parts`. Return the fused parts, and how
    many parts they replace."""
    rest = [part for _, part in parts]
    factor, consumed = 1.0, 0
    if isinstance(rest[0], Scale):
        if len(rest) < 2 or not isinstance(rest[1], Add):
            return [rest[0]], 1
        factor, consumed = rest[0].factor, 1
    add = rest[consumed]
    assert isinstance(add, Add)
    next_part = rest[consumed + 1] if consumed + 1 < len(rest) else None
    norm = next_part if isinstance(next_part, Norm | LayerNorm) else None
    return [AddNorm(add.held, factor, norm)], consumed + (2 if norm else 1)
