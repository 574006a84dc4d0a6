"""The layout of cached keys and values: a list of layer groups, its encoding, and the location of
blocks in memory. Pure, without torch.

One block of one layer, on the wire and in the pool, is [2, kv_heads, block_size, head_dim], keys
first; a group may store its keys as [head_dim, block_size] instead. A group with latent attention
has only keys, a part of which serves as the value: [1, kv_heads, block_size, head_dim].

The encoding begins with its version. Decoding accepts exactly what encoding produces.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pdserve.engine.kv.identity import SIDES

Kind = Literal["full", "window", "latent"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}  # of one key or value


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Model layers with the same kind of attention and the same KV layout, which share block tables
    and prefix cache entries."""

    layers: tuple[int, ...]  # model layer numbers
    kind: Kind
    window: int  # tokens; 0 unless kind is "window"
    num_kv_heads: int  # of the whole model
    head_dim: int
    dtype: str  # one of DTYPE_BYTES, by its torch name
    head_start: int  # head range held here: [head_start, head_end)
    head_end: int
    keys_by_dim: bool = False  # keys of a block are [head_dim, block_size], as kernels need

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of a block without its tokens: (2 for keys and values or 1 if latent, heads held
        here, head_dim). In the array of a block, block_size comes before head_dim."""
        planes = 1 if self.kind == "latent" else 2
        return (planes, self.head_end - self.head_start, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        """Return the size in bytes of one block of one layer."""
        planes, heads, head_dim = self.block_shape
        vectors = planes * heads * block_size  # a key or a value of one token and head
        if self.dtype == "int8":
            return vectors * (head_dim + 4)  # the float32 scales follow all values
        return vectors * head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KvSpec:
    """Layout of a KV cache: tokens per block, and the layer groups."""

    block_size: int  # tokens per block
    groups: tuple[LayerGroup, ...]

    def pool_bytes(self, num_blocks: Sequence[int]) -> int:
        """Return the size in bytes of a KV pool that has `num_blocks[g]` blocks for layer group
        g."""
        return sum(
            count * len(group.layers) * group.block_bytes(self.block_size)
            for count, group in zip(num_blocks, self.groups, strict=True)
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the number of blocks needed to hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def window_blocks(window: int, chunk_size: int, block_size: int) -> int:
    """Return the number of blocks that hold a prefill chunk and the attention window before it,
    wherever in a block the chunk begins."""
    return blocks_for(window - 1 + chunk_size, block_size) + 1


def pool_sizes(spec: KvSpec, num_blocks: int, max_running: int, chunk_size: int) -> tuple[int, ...]:
    """Return the number of blocks of each layer group, if a group with full attention has
    `num_blocks`.

    A window group gets enough blocks for each row of a full batch to compute a chunk, and one more
    window per row, for the prefix cache, parked requests and KV from prefill workers; but at most
    `num_blocks`. If all groups are window groups, each gets `num_blocks`.
    """
    if all(group.kind == "window" for group in spec.groups):
        return (num_blocks,) * len(spec.groups)  # they set how much the worker holds

    def size(group: LayerGroup) -> int:
        if group.kind != "window":
            return num_blocks
        needed = window_blocks(group.window, chunk_size, spec.block_size)
        extra = blocks_for(group.window, spec.block_size) + 1
        return min(num_blocks, max_running * (needed + extra))

    return tuple(map(size, spec.groups))


def spec_difference(local: KvSpec, remote: KvSpec, sides: tuple[str, str] = SIDES) -> str:
    """Describe the first difference between the KV layouts of two processes; empty if they are
    equal. `sides`: what to call the two processes."""
    local_side, remote_side = sides
    if local.block_size != remote.block_size:
        return f"block size {local.block_size} {local_side}, {remote.block_size} {remote_side}"
    if len(local.groups) != len(remote.groups):
        return f"{len(local.groups)} layer groups {local_side}, {len(remote.groups)} {remote_side}"
    for i, (a, b) in enumerate(zip(local.groups, remote.groups, strict=True)):
        for name in LayerGroup.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                return f"{name} of group {i}: {x} {local_side}, {y} {remote_side}"
    return ""


@dataclass(frozen=True, slots=True)
class Pages:
    """Addresses of whole KV blocks in consecutive layers of a layer group. On the wire the blocks
    are [layers, blocks, bytes of a block]."""

    base: int  # address of block 0 of the group's first layer
    layer_bytes: int  # from one layer to the next
    block_bytes: int
    layers: range  # within the group
    blocks: tuple[int, ...]
    ready: Any = None  # device event before any read or write of the blocks; None: at once

    @property
    def num_bytes(self) -> int:
        return len(self.layers) * len(self.blocks) * self.block_bytes


SPEC_VERSION = 1
_KINDS: tuple[Kind, ...] = get_args(Kind)
_DTYPES = tuple(DTYPE_BYTES)
_SPEC = struct.Struct("<BIB")  # version, block size, number of groups
_GROUP = struct.Struct("<BIIIBIIBH")  # ends with the number of layers


def encode_spec(spec: KvSpec) -> bytes:
    """Encode a KV layout as bytes, which are equal only for equal layouts."""
    encoded = _SPEC.pack(SPEC_VERSION, spec.block_size, len(spec.groups))
    for group in spec.groups:
        encoded += _GROUP.pack(
            _KINDS.index(group.kind),
            group.window,
            group.num_kv_heads,
            group.head_dim,
            _DTYPES.index(group.dtype),
            group.head_start,
            group.head_end,
            group.keys_by_dim,
            len(group.layers),
        )
        encoded += struct.pack(f"<{len(group.layers)}H", *group.layers)
    return encoded


def decode_spec(data: bytes) -> KvSpec:
    """Decode a KV layout from the bytes that `encode_spec` returns. Raises ValueError if they are
    malformed or have another version."""
    try:
        version, block_size, count = _SPEC.unpack_from(data)
        if version != SPEC_VERSION:
            raise ValueError(
                f"the KV layout has version {version}; expected version {SPEC_VERSION}"
            )
        offset = _SPEC.size
        groups = []
        for _ in range(count):
            kind, window, heads, head_dim, dtype, start, end, by_dim, num_layers = (
                _GROUP.unpack_from(data, offset)
            )
            if by_dim > 1:
                raise ValueError(f"the KV layout's flag keys_by_dim is {by_dim}, not 0 or 1")
            offset += _GROUP.size
            layers = struct.unpack_from(f"<{num_layers}H", data, offset)
            offset += 2 * num_layers
            groups.append(
                LayerGroup(
                    layers=layers,
                    kind=_KINDS[kind],
                    window=window,
                    num_kv_heads=heads,
                    head_dim=head_dim,
                    dtype=_DTYPES[dtype],
                    head_start=start,
                    head_end=end,
                    keys_by_dim=bool(by_dim),
                )
            )
    except (struct.error, IndexError) as err:
        raise ValueError(f"the KV layout is malformed: {err}") from None
    if offset != len(data):
        raise ValueError(f"the KV layout has {len(data) - offset} bytes after its end")
    return KvSpec(block_size, tuple(groups))


def spec_digest(spec: KvSpec) -> bytes:
    """Return the SHA-256 of the encoded KV layout."""
    return hashlib.sha256(encode_spec(spec)).digest()
