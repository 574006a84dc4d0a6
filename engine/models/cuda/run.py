"""The values that pass from launch to launch within a step."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pdserve.engine.models.cuda.inputs import StepInputs
from pdserve.kernels.cuda.linear.product import SplitSums


class Run:
    """One pass over the parts: `residual` is the residual stream [tokens, hidden], which sums
    change in place; `kv` has, by model layer, its blocks and its group."""

    def __init__(
        self,
        residual: Tensor,
        inputs: StepInputs,
        kv: Sequence[tuple[Tensor, int]],
    ) -> None:
        self.residual, self.inputs, self.kv = residual, inputs, kv
        self.held: Tensor | None = None
        self._x: Tensor | SplitSums = residual

    @property
    def x(self) -> Tensor:
        """The input of the next part."""
        assert not isinstance(self._x, SplitSums), "the split sums of x have not been added"
        return self._x

    @x.setter
    def x(self, x: Tensor | SplitSums) -> None:
        self._x = x

    @property
    def sums(self) -> Tensor | SplitSums:
        """x, for a part that adds the splits itself."""
        return self._x


class Launch(Protocol):
    """A part, ready to run."""

    def __call__(self, run: Run) -> None: ...
