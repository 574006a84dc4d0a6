"""What goes from launch to launch within a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pdserve.engine.models.cuda.inputs import StepInputs
from pdserve.kernels.cuda.linear.product import SplitSums


@dataclass(slots=True)
class Run:
    """One pass over the parts."""

    residual: Tensor  # the residual stream [tokens, hidden]; sums change it in place
    x: Tensor  # what the next part takes
    held: Tensor | None
    inputs: StepInputs
    kv: Sequence[tuple[Tensor, int]]  # by model layer: its blocks, its group
    sums: SplitSums | None = None  # what x is, once its splits are added

    def take(self) -> Tensor | SplitSums:
        """x, for a part that adds splits itself."""
        taken, self.sums = self.sums or self.x, None
        return taken


class Launch(Protocol):
    """A part, ready to run."""

    def __call__(self, run: Run) -> None: ...
