"""The geometry of cached keys and values, as a list of layer groups. Pure: no torch.

One block of one layer, on the wire and in the pool: [2, kv_heads, block_size, head_dim], keys
first; a group may keep its keys [head_dim, block_size]. A latent group has keys alone, of which a
part is the value: [1, kv_heads, block_size, head_dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "window", "latent"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # of one key or value


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables, bitmaps and hits."""

    layers: tuple[int, ...]  # model layer numbers
    kind: Kind
    window: int  # tokens; 0 unless kind is "window"
    num_kv_heads: int  # of the whole model
    head_dim: int
    dtype: str  # one of DTYPE_BYTES, by its torch name
    head_start: int  # head range held here: [head_start, head_end)
    head_end: int
    keys_by_dim: bool = False  # a block's keys lie [head_dim, block_size], as the kernels want them

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """(2, or 1 if latent, heads held here, head_dim); block_size goes between the last two."""
        planes = 1 if self.kind == "latent" else 2
        return (planes, self.head_end - self.head_start, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one layer."""
        planes, heads, head_dim = self.block_shape
        vectors = planes * heads * block_size  # a key or a value of one token and head
        if self.dtype == "int8":
            return vectors * (head_dim + 4)  # behind all values their float32 scales
        return vectors * head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What a KV cache holds."""

    block_size: int  # tokens per block
    groups: tuple[LayerGroup, ...]

    def pool_bytes(self, num_blocks: Sequence[int]) -> int:
        """Bytes of pools with `num_blocks[g]` blocks of group g."""
        return sum(
            count * len(group.layers) * group.block_bytes(self.block_size)
            for count, group in zip(num_blocks, self.groups, strict=True)
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def window_blocks(window: int, chunk_size: int, block_size: int) -> int:
    """Blocks that hold a chunk and what its first token sees through a window, wherever in a block
    the chunk begins."""
    return blocks_for(window - 1 + chunk_size, block_size) + 1


def pool_sizes(spec: KvSpec, num_blocks: int, max_running: int, chunk_size: int) -> tuple[int, ...]:
    """Blocks of each group's pool where a group with full attention has `num_blocks`.

    Beside such a group, one of a window has no more than this for each row of a full batch: what a
    chunk needs, and one window more, for what is in the prefix cache, parked or on its way from a
    prefill worker.
    """
    if all(group.kind == "window" for group in spec.groups):
        return (num_blocks,) * len(spec.groups)  # these say how much the worker holds

    def size(group: LayerGroup) -> int:
        if group.kind != "window":
            return num_blocks
        needed = window_blocks(group.window, chunk_size, spec.block_size)
        kept = blocks_for(group.window, spec.block_size) + 1
        return min(num_blocks, max_running * (needed + kept))

    return tuple(map(size, spec.groups))


def spec_difference(ours: KvSpec, theirs: KvSpec) -> str:
    """Says which field differs first; empty if none does."""
    if ours.block_size != theirs.block_size:
        return f"block size {ours.block_size} here, {theirs.block_size} there"
    if len(ours.groups) != len(theirs.groups):
        return f"{len(ours.groups)} layer groups here, {len(theirs.groups)} there"
    for i, (a, b) in enumerate(zip(ours.groups, theirs.groups, strict=True)):
        for name in LayerGroup.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                return f"{name} of group {i}: {x} here, {y} there"
    return ""
