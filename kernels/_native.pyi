"""The compiled kernels: what each file of native/bind declares, in the order of module.cpp."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def isas() -> list[str]: ...

class Context:
    def __init__(
        self, threads: int, cpus: Sequence[int] = ..., isa: str = "", spin_us: int = 100
    ) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...

class Matrix:
    @staticmethod
    def pack(
        context: Context, format: str, data: NDArray[np.uint8], rows: int, cols: int
    ) -> Matrix: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def layout(self) -> str: ...
    def row_values(self, context: Context, ids: NDArray[np.int64]) -> NDArray[np.float32]: ...

def linear(
    context: Context,
    x: NDArray[np.float32],
    matrices: Sequence[Matrix],
    bias: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def linear_into(
    context: Context,
    x: NDArray[np.float32],
    matrices: Sequence[Matrix],
    out: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
) -> None: ...
