"""Where a checkpoint keeps the tensors that a model asks for, if not under their own names: under
another one, as rows of a tensor that holds several, or as one matrix of a stack.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.source import (
    Checkpoint,
    CheckpointError,
    Layout,
    TextFiles,
    unknown_tensor,
)
from pdserve.engine.weights.format import RawTensor


class Nth(NamedTuple):
    """A matrix of a stack of `of`."""

    number: int
    of: int


Rows = slice | NDArray[np.int64] | Nth


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Rows of a stored tensor, or one matrix of a stack; None: all as it is."""

    source: str  # Hugging Face's name
    rows: Rows | None = None
    fallback: "View | None" = None  # of another tensor, for files that have no `source`
    is_row: bool = False  # a vector stands for a matrix of one row

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of what it shows of a tensor of shape `stored`. Raises CheckpointError."""
        match self.rows:
            case None:
                return (1, *stored) if self.is_row and len(stored) == 1 else stored
            case Nth(_, of):
                if stored[:1] != (of,):
                    raise CheckpointError(
                        f"tensor {self.source} is {list(stored)}, config says {of} matrices"
                    )
                return stored[1:]
            case slice() as rows:
                return (len(range(*rows.indices(stored[0]))), *stored[1:])
            case order:
                return (len(order), *stored[1:])


class ViewedCheckpoint:
    """Implements Checkpoint: another one under the names that its model asks for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        views: Mapping[str, View],
        unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """What is stored under its own name needs no view of another tensor. `unused` tells stored
        names that the model has no use for."""
        self._checkpoint = checkpoint
        own = {name for name in checkpoint.names() if not unused(name)}
        found = ((name, _first(view, own)) for name, view in views.items())
        views = {
            name: view
            for name, view in found
            if view is not None and (view.source == name or name not in own)
        }
        used = {view.source for view in views.values()}
        self._views = {name: View(name) for name in own - used} | views

    @property
    def hf_config(self) -> dict[str, Any]:
        return self._checkpoint.hf_config

    @property
    def files(self) -> tuple[str, ...]:
        return self._checkpoint.files

    @property
    def text_paths(self) -> tuple[str, ...]:
        return self._checkpoint.text_paths

    def names(self) -> Collection[str]:
        return self._views.keys()

    def layout(self, name: str) -> Layout:
        view = self._views[name]
        format, shape = self._checkpoint.layout(view.source)
        return Layout(format, view.shape(shape))

    def tensor(self, name: str) -> RawTensor:
        if name not in self._views:
            raise unknown_tensor(name, self._views)
        view = self._views[name]
        raw = self._checkpoint.tensor(view.source)
        shape = view.shape(raw.shape)
        match view.rows:
            case None:
                return raw if shape == raw.shape else raw.as_row()
            case Nth(number, _):
                return raw.matrix(number)
            case rows:
                return raw.rows(rows)

    def release(self, name: str) -> None:
        self._checkpoint.release(self._views[name].source)

    def text_files(self) -> TextFiles:
        return self._checkpoint.text_files()


def _first(view: View | None, stored: Collection[str]) -> View | None:
    """The view itself or the first of those behind it whose source is there."""
    while view is not None and view.source not in stored:
        view = view.fallback
    return view


def fused(prefix: str, source: str, parts: Mapping[str, int]) -> dict[str, View]:
    """Views of modules that are stored one above the other in the module `source`: each name with
    its number of rows, in order. `prefix` comes before all names."""
    views: dict[str, View] = {}
    begin = 0
    for name, count in parts.items():
        rows = slice(begin, begin + count)
        for leaf in ("weight", "bias"):
            views[f"{prefix}{name}.{leaf}"] = View(f"{prefix}{source}.{leaf}", rows)
        begin += count
    return views


def renamed(prefix: str, names: Mapping[str, str]) -> dict[str, View]:
    """Views of modules that are stored under other names: ours, theirs."""
    return {
        f"{prefix}{ours}.{leaf}": View(f"{prefix}{theirs}.{leaf}")
        for ours, theirs in names.items()
        for leaf in ("weight", "bias")
    }


def stacked(prefix: str, modules: Collection[str], count: int) -> dict[str, View]:
    """Views of the modules {prefix}{n}.{module} of which one tensor {prefix}{module} holds all."""
    return {
        f"{prefix}{n}.{module}.weight": View(f"{prefix}{module}.weight", Nth(n, count))
        for n in range(count)
        for module in modules
    }


def halves_first(heads: int, head_dim: int, rotary_dim: int) -> NDArray[np.int64]:
    """The order of rows for rope over two halves, where they are stored for rope over neighbours:
    of the first `rotary_dim` rows of each head the even ones come first."""
    one = np.arange(head_dim)
    one[:rotary_dim] = one[:rotary_dim].reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * head_dim + one).reshape(-1)
