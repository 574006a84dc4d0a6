"""One storage format of weights: how many bytes hold how many values, and how to read them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as it is stored, read-only.

    `data` has `shape` and a native dtype if `format` is F32, F16, BF16, ...; otherwise it is uint8
    [*shape[:-1], bytes per row], the row's blocks in file order (formats/).
    """

    data: Tensor
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Format:
    """A row of values is a run of blocks; blocks never cross rows."""

    name: str  # GGUF's type name
    block_values: int
    block_bytes: int
    unpack: Callable[[Tensor], Tensor]  # uint8 [blocks, block_bytes] -> float32 [blocks, values]

    def row_bytes(self, row_values: int) -> int:
        """Bytes of a row; raises ValueError if it is not a whole number of blocks."""
        if row_values % self.block_values:
            raise ValueError(
                f"a row of {row_values} values is no multiple of {self.name}'s {self.block_values}"
            )
        return row_values // self.block_values * self.block_bytes
