"""Views that make a model's tensors from a checkpoint's stored tensors: under another name, as rows
of a fused tensor, as one matrix of a stack, or transposed."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.checkpoints.source import (
    Checkpoint,
    CheckpointError,
    Layout,
    StoredPooling,
    TextFiles,
    unknown_tensor,
)
from pdserve.engine.weights import PLAIN, RawTensor, as_plain


class Nth(NamedTuple):
    """Selects matrix `number` from a tensor that stacks `of` matrices."""

    number: int
    of: int


class HeadRows(NamedTuple):
    """Selects the rows [begin, end) of each head from a matrix of `heads` * `rows` rows, as a stack
    of one matrix per head."""

    heads: int
    begin: int
    end: int
    rows: int


class RopeRows(NamedTuple):
    """Reorders the rows of a matrix of `heads` * `head_dim` rows for rope. In each head, the
    `rope_dim` rows from row `begin` on, which rope rotates, come first. With `interleaved`, the
    file stores the two rows of a rotated pair next to each other; the first rows of all pairs then
    precede the second ones. The heads may be rows of a fused matrix of `stored` rows: the first
    one from row `first` on, the others each `stride` rows later."""

    heads: int
    head_dim: int
    rope_dim: int
    begin: int = 0
    interleaved: bool = True
    first: int = 0
    stride: int = 0  # 0: head_dim
    stored: int = 0  # 0: only the rows of the heads

    def order(self) -> NDArray[np.int64]:
        """Return for each row of the result the index of the stored row, int64 [heads * head_dim].
        The sizes come from a config, so compare them with the stored shape first."""
        head_rows = np.arange(self.head_dim)
        rope = head_rows[self.begin : self.begin + self.rope_dim]
        first = rope.reshape(-1, 2).T.reshape(-1) if self.interleaved else rope
        head_rows = np.concatenate(
            (first, head_rows[: self.begin], head_rows[self.begin + self.rope_dim :])
        )
        begins = self.first + np.arange(self.heads) * (self.stride or self.head_dim)
        return (begins[:, None] + head_rows).reshape(-1)


Rows = slice | RopeRows


@dataclass(frozen=True, slots=True)
class View:
    """How to make a tensor of the model from a stored tensor. A view applies these steps in this
    order, each only if set:

    - `matrix`: [n, rows, columns] -> [rows, columns], one matrix of a stack;
    - `heads`: [heads * rows, columns] -> [heads, end - begin, columns], some rows of each head;
    - `transposed`: [..., rows, columns] -> [..., columns, rows];
    - `rows`: some of the rows, or all rows in another order.
    """

    source: str  # name of the stored tensor in Hugging Face's terms
    rows: Rows | None = None
    matrix: Nth | None = None
    heads: HeadRows | None = None
    transposed: bool = False  # quantized matrices need `heads` and become float32
    fallback: "View | None" = None  # a view of another tensor, for files without `source`
    is_row: bool = False  # a vector [columns] -> [1, columns]

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the view's result for a stored tensor of shape `stored`. Raises
        CheckpointError if the stored shape contradicts the config."""
        shape = stored
        if self.matrix:
            if stored[:1] != (self.matrix.of,):
                raise CheckpointError(
                    f"tensor {self.source} is {list(stored)}; "
                    f"the config says {self.matrix.of} matrices"
                )
            shape = shape[1:]
        if self.heads:
            if len(shape) != 2 or shape[0] != self.heads.heads * self.heads.rows:
                raise self._mismatch(stored, self.heads.heads, self.heads.rows)
            shape = (self.heads.heads, self.heads.end - self.heads.begin, *shape[1:])
        if self.transposed:
            shape = (*shape[:-2], *shape[:-3:-1])
        if isinstance(self.rows, slice):
            shape = (len(range(*self.rows.indices(shape[0]))), *shape[1:])
        elif self.rows:
            count = self.rows.heads * self.rows.head_dim
            if shape[:1] != (self.rows.stored or count,):
                raise self._mismatch(stored, self.rows.heads, self.rows.head_dim)
            shape = (count, *shape[1:])
        return (1, *shape) if self.is_row and len(shape) == 1 else shape

    def _mismatch(self, stored: tuple[int, ...], heads: int, rows: int) -> CheckpointError:
        return CheckpointError(
            f"tensor {self.source} is {list(stored)}; the config says {heads} heads of {rows} rows"
        )

    def format(self, stored: str) -> str:
        """Return the format of the view's result for a stored tensor of format `stored`. A
        quantized matrix that is split into heads and transposed becomes float32, because
        quantization blocks and groups lie along columns. Without `heads`, `of` refuses to transpose
        one."""
        return "F32" if self.heads and self.transposed and stored not in PLAIN else stored

    def of(self, raw: RawTensor) -> RawTensor:
        """Apply the view to a stored tensor and return the result. Raises CheckpointError."""
        shape = self.shape(raw.shape)
        if self.matrix:
            raw = raw.matrix(self.matrix.number)
        if self.heads:
            raw = raw.of_heads(*self.heads[:3])
            raw = as_plain(raw, self.format(raw.format))
        if self.transposed:
            if raw.format not in PLAIN or len(raw.shape) < 2:
                raise CheckpointError(
                    f"tensor {self.source} is {raw.format}, which cannot be transposed"
                )
            raw = raw.transposed()
        if self.rows is not None:
            raw = raw.rows(self.rows if isinstance(self.rows, slice) else self.rows.order())
        return raw if raw.shape == shape else raw.as_row()


class ViewedCheckpoint:
    """A Checkpoint that presents another one's tensors under the names, and in the form, that the
    model uses."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        views: Mapping[str, View],
        unused: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Wrap a checkpoint. `views` maps names of the model to views of stored tensors; a tensor
        stored under the model's name takes precedence over a view of another one. `unused` returns
        whether the model ignores a stored tensor."""
        self._checkpoint = checkpoint
        stored = {name for name in checkpoint.names() if not unused(name)}
        candidates = ((name, _first(view, stored)) for name, view in views.items())
        views = {
            name: view
            for name, view in candidates
            if view is not None and (view.source == name or name not in stored)
        }
        used = {view.source for view in views.values()}
        self._views = {name: View(name) for name in stored - used} | views

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
        return Layout(view.format(format), view.shape(shape))

    def source(self, name: str) -> str:
        """Return the name of the stored tensor from which the model's tensor `name` is made."""
        return self._views[name].source

    def expanded(self) -> Collection[str]:
        """Return the names of the transposed tensors that become float32, since their stored format
        is quantized and has no transpose."""
        return [
            name
            for name, view in self._views.items()
            if view.transposed and self._checkpoint.layout(view.source).format not in PLAIN
        ]

    def tensor(self, name: str) -> RawTensor:
        if name not in self._views:
            raise unknown_tensor(name, self._views)
        view = self._views[name]
        return view.of(self._checkpoint.tensor(view.source))

    def release(self, name: str) -> None:
        self._checkpoint.release(self._views[name].source)

    def text_files(self) -> TextFiles:
        return self._checkpoint.text_files()

    def pooling(self) -> StoredPooling | None:
        return self._checkpoint.pooling()


def _first(view: View | None, stored: Collection[str]) -> View | None:
    """Return the first of a view and its fallbacks whose stored tensor exists; None if none
    does."""
    while view is not None and view.source not in stored:
        view = view.fallback
    return view


def fused(prefix: str, source: str, parts: Mapping[str, int]) -> dict[str, View]:
    """Return views of modules whose rows are concatenated in the module `source`. `parts` maps each
    name to its number of rows, in order; `prefix` precedes all names. The last module gets all
    remaining rows, so that its shape reveals a source with too many rows."""
    views: dict[str, View] = {}
    begin, last = 0, list(parts)[-1]
    for name, count in parts.items():
        rows = slice(begin, None if name == last else begin + count)
        for leaf in ("weight", "bias"):
            views[f"{prefix}{name}.{leaf}"] = View(f"{prefix}{source}.{leaf}", rows)
        begin += count
    return views


def renamed(prefix: str, names: Mapping[str, str]) -> dict[str, View]:
    """Return views of modules that the checkpoint stores under other names; `names` maps a model's
    name to the stored one, and `prefix` precedes both."""
    return {
        f"{prefix}{name}.{leaf}": View(f"{prefix}{stored}.{leaf}")
        for name, stored in names.items()
        for leaf in ("weight", "bias")
    }


def first_of(*views: View) -> View:
    """Combine views into one: the first whose stored tensor exists applies."""
    chain: View | None = None
    for view in reversed(views):
        chain = replace(view, fallback=chain)
    assert chain is not None
    return chain
