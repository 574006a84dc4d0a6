"""Loads the tensors of a checkpoint by several threads, in the order in which they are wanted.

A loaded tensor is handed over once and then belongs to the caller; what runs ahead of the caller is
bounded by what the model needs anyway.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from pdserve.engine.checkpoints.digest import leaf, merkle_root
from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError
from pdserve.engine.weights.format import RawTensor
from pdserve.engine.weights.registry import NATIVE, unpack_into

PIECE_VALUES = 1 << 22  # of one task

# Left in old files by frameworks, and computed by every decoder itself.
COMPUTED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A tensor on its way: complete when all pieces are."""

    result: Tensor | RawTensor
    pieces: list[Future[None]]


def check_names(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    """Raises CheckpointError that names what is missing, what nobody uses and what has another
    shape than the config says. With a `tied` head a stored copy of it is tolerated.
    """
    there = {name for name in checkpoint.names() if not name.endswith(COMPUTED)}
    if tied:
        there.discard("lm_head.weight")
    problems = [
        f"{what} {len(names)} tensors: {', '.join(sorted(names)[:5])}{', ...' * (len(names) > 5)}"
        for what, names in (
            ("it lacks", shapes.keys() - there),
            ("its config has no use for", there - shapes.keys()),
        )
        if names
    ]
    for name in sorted(there & shapes.keys()):
        stored = checkpoint.layout(name).shape
        if stored != shapes[name]:
            problems.append(f"{name} is {list(stored)}, config says {list(shapes[name])}")
            break
    if problems:
        raise CheckpointError("the model does not fit its config: " + "; ".join(problems))


class WeightLoader:
    """A context manager; calling it with a name waits for that tensor and gives it away."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None,
        device: torch.device,
        threads: int,
        hashed: bool,
        copied: bool,
        progress: Callable[[float], None],
    ) -> None:
        """Loads in the order of `shapes`. `dtype` None leaves matrices as they are stored; vectors
        always stay so. `copied`: the caller has copied what it was given when it asks for the next,
        so that the file's pages need not stay in memory. `progress` gets a growing fraction, from
        one loading thread at a time.
        """
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._hashed = hashed
        self._copied = copied
        self._given = ""  # the last name
        self._progress = progress
        self._ahead = deque(shapes)
        self._pending: dict[str, _Pending] = {}
        self._depth = 2 * threads + 2
        self._leaves: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(math.prod(shape) for shape in shapes.values())
        self.expanded_bytes = 0  # of matrices that were not stored in `dtype`
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="load")

    def __enter__(self) -> "WeightLoader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._release(self._given)

    def __call__(self, name: str) -> Tensor | RawTensor:
        """The tensor on the device. Raises what its loading raised."""
        self._release(self._given)
        self._given = name
        if name not in self._pending:
            self._ahead.remove(name)
            self._start(name)
        while self._ahead and len(self._pending) < self._depth:
            self._start(self._ahead.popleft())
        pending = self._pending.pop(name)
        for piece in pending.pieces:
            piece.result()
        if isinstance(pending.result, Tensor):
            return pending.result.to(self._device)
        raw = pending.result
        return RawTensor(raw.data.to(self._device), raw.format, raw.shape)

    def digest(self) -> str:
        """Hex Merkle root over all tensors; only if `hashed`, after all have been handed over."""
        assert self._hashed
        assert not self._ahead
        return merkle_root({name: future.result() for name, future in self._leaves.items()})

    def _start(self, name: str) -> None:
        raw = self._checkpoint.tensor(name)
        if self._hashed:
            self._leaves[name] = self._pool.submit(leaf, name, raw)
            self._leaves[name].add_done_callback(lambda _: self._release(name))
        stays = self._dtype is None or len(raw.shape) < 2
        if stays or self._dtype == NATIVE.get(raw.format):
            self._pending[name] = _Pending(raw if stays else raw.data, [])
            self._count(math.prod(raw.shape))
            return
        with torch.inference_mode(False):  # a caller's mode is not that of the threads that write
            out = torch.empty(raw.shape, dtype=self._dtype)
        self.expanded_bytes += out.nbytes
        rows = max(1, PIECE_VALUES * raw.shape[0] // max(1, out.numel()))
        pieces = [
            self._pool.submit(self._expand, raw, out, start, min(start + rows, raw.shape[0]))
            for start in range(0, raw.shape[0], rows)
        ]
        self._pending[name] = _Pending(out, pieces)

    def _expand(self, raw: RawTensor, out: Tensor, start: int, end: int) -> None:
        """Rows [start, end) of one tensor."""
        shape = (end - start, *raw.shape[1:])
        unpack_into(RawTensor(raw.data[start:end], raw.format, shape), out[start:end])
        self._count(math.prod(shape))

    def _release(self, name: str) -> None:
        if self._copied and name:
            self._checkpoint.release(name)

    def _count(self, values: int) -> None:
        with self._lock:
            self._done += values
            self._progress(self._done / self._total)
