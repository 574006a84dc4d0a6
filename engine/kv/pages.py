"""Location of blocks in a KV pool's memory, for copies on the device. Pure."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole blocks of consecutive layers of a group; on the wire [layers, blocks, block bytes]."""

    base: int  # address of block 0 of the group's first layer
    layer_bytes: int  # from one layer to the next
    block_bytes: int
    layers: range  # within the group
    blocks: tuple[int, ...]
    ready: Any = None  # device event before any read or write of the blocks; None: at once

    @property
    def num_bytes(self) -> int:
        return len(self.layers) * len(self.blocks) * self.block_bytes
