"""Loads the tensors of a checkpoint with several threads, in the order in which they are needed,
and computes digests of weights.

A loaded tensor is returned once and then belongs to the caller; the number loaded ahead is bounded.
A digest is the root of a Merkle tree (RFC 6962: leaves prefixed 0, nodes 1) over the tensors sorted
by name. A leaf hashes name, format, shape and the SHA-256 of the stored bytes in Hugging Face's row
order, so the digest identifies the weights and not the files that hold them.
"""

import hashlib
import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType, TracebackType

import numpy as np

from pdserve.engine.checkpoints.source import Checkpoint, CheckpointError, Layout
from pdserve.engine.weights import (
    PIECE_VALUES,
    PLAIN,
    VALUES,
    RawTensor,
    empty,
    quantize_into,
    quantized_empty,
    row_runs,
    unpack_into,
)
from pdserve.engine.weights import VERSION as QUANTIZER

LABELS = {"F32": "float32", "F16": "float16", "BF16": "bf16", "F64": "float64"}


def quantization_label(layouts: Iterable[Layout]) -> str:
    """Return the format in which most values of a model's matrices are stored, e.g. "Q4_1",
    "bf16"."""
    assert LABELS.keys() == PLAIN.keys()
    values: Counter[str] = Counter()
    for stored in layouts:
        if len(stored.shape) > 1:
            values[stored.format] += math.prod(stored.shape)
    dominant = values.most_common(1)[0][0]
    return LABELS.get(dominant, dominant)


def leaf(name: str, raw: RawTensor) -> bytes:
    """Return the Merkle leaf of one tensor: a hash of its name, format, shape and bytes. For a
    tensor of several parts it covers the hash of each part; for a tensor with reordered columns
    also their order."""
    hashes = {
        part: hashlib.sha256(np.ascontiguousarray(array).data) for part, array in raw.parts.items()
    }
    if len(hashes) == 1:
        (digest,) = hashes.values()
        content = digest.digest()
    else:
        description = [
            [part, array.dtype.str, list(array.shape), hashes[part].hexdigest()]
            for part, array in sorted(raw.parts.items())
        ]
        content = hashlib.sha256(json.dumps(description).encode()).digest()
    if raw.columns is not None:
        content = hashlib.sha256(content + raw.columns.tobytes()).digest()
    head = json.dumps([name, raw.format, list(raw.shape)], separators=(",", ":")).encode()
    return hashlib.sha256(b"\0" + content + head).digest()


def quantized_digest(digest: str, formats: Mapping[str, str]) -> str:
    """Return the digest of weights that are quantized while they are loaded. It covers the digest
    of the stored weights, the quantizer's version, and the format of each quantized tensor."""
    content = [digest, QUANTIZER, sorted(formats.items())]
    return hashlib.sha256(b"quantized " + json.dumps(content).encode()).hexdigest()


def merkle_root(leaves: Mapping[str, bytes]) -> str:
    """Return the hex root of the Merkle tree over the leaves, sorted by tensor name. A node without
    a sibling moves up unchanged."""
    level = [leaves[name] for name in sorted(leaves)]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [
            hashlib.sha256(b"\1" + b"".join(p)).digest() if len(p) > 1 else p[0] for p in pairs
        ]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()


# Frameworks left these in old files; every decoder computes them.
COMPUTED = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A tensor that is being loaded; it is complete when all its pieces are."""

    result: RawTensor
    pieces: list[Future[None]]


def check_names(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], tied: Collection[str]
) -> None:
    """Raise CheckpointError if the checkpoint's tensors do not match the config. The error names
    missing tensors, unused tensors and one tensor of another shape. Stored copies of `tied` tensors
    are tolerated."""
    present = {name for name in checkpoint.names() if not name.endswith(COMPUTED)} - {*tied}
    problems = [
        f"{kind} {len(names)} tensors: {', '.join(sorted(names)[:5])}{', ...' * (len(names) > 5)}"
        for kind, names in (
            ("missing", shapes.keys() - present),
            ("unexpected", present - shapes.keys()),
        )
        if names
    ]
    for name in sorted(present & shapes.keys()):
        stored = checkpoint.layout(name).shape
        if stored != shapes[name]:
            problems.append(f"{name} is {list(stored)}; the config says {list(shapes[name])}")
            break
    if problems:
        raise CheckpointError("the model does not match its config: " + "; ".join(problems))


class WeightLoader:
    """Loads tensors ahead on several threads; a context manager. Calling it with a name waits for
    that tensor and returns it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        format: str | None,
        threads: int,
        hashed: bool,
        copied: bool,
        progress: Callable[[float], None],
        quantized: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Load the checkpoint's tensors in the order of `shapes`.

        `format`: the plain number format to which matrices are expanded; None keeps the stored
        format, which vectors always keep. `quantized`: tensor name -> block format to which a
        matrix is quantized first. `hashed`: compute the tensors' hashes for `digest`. `copied`: the
        caller has copied a tensor when it requests the next, so the file's pages may be freed.
        `progress` gets a growing fraction, from one loading thread at a time.
        """
        self._checkpoint = checkpoint
        self._format = format
        self._quantized = quantized
        self._hashed = hashed
        self._copied = copied
        self._last_name = ""  # of the last returned tensor
        self._progress = progress
        self._ahead = deque(shapes)
        self._pending: dict[str, _Pending] = {}
        self._vectors: dict[str, RawTensor] = {}
        self._depth = 2 * threads + 2
        self._leaves: dict[str, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._done = 0
        self._total = sum(math.prod(shape) for shape in shapes.values())
        self.expanded_bytes = 0  # of matrices whose stored format is not `format`
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
        self._release(self._last_name)

    def __call__(self, name: str) -> RawTensor:
        """Wait for a tensor and return it; vectors may be requested again. Raises the errors of its
        loading."""
        if name in self._vectors:
            return self._vectors[name]
        self._release(self._last_name)
        self._last_name = name
        if name not in self._pending:
            self._ahead.remove(name)
            self._start(name)
        while self._ahead and len(self._pending) < self._depth:
            self._start(self._ahead.popleft())
        pending = self._pending.pop(name)
        for piece in pending.pieces:
            piece.result()
        if len(pending.result.shape) < 2:
            self._vectors[name] = pending.result
        return pending.result

    def digest(self) -> str:
        """Return the hex Merkle root over all tensors. Requires `hashed`; call it after the last
        tensor."""
        assert self._hashed
        assert not self._ahead
        return merkle_root({name: future.result() for name, future in self._leaves.items()})

    def _start(self, name: str) -> None:
        try:
            raw = self._checkpoint.tensor(name)
        except ValueError as error:  # from numpy: parts whose sizes do not match
            raise CheckpointError(f"tensor {name}: {error}") from error
        if self._hashed:
            self._leaves[name] = self._pool.submit(leaf, name, raw)
            self._leaves[name].add_done_callback(lambda _: self._release(name))
        stored = self._quantized.get(name, raw.format)
        format = stored if len(raw.shape) < 2 else self._format or stored
        if format == raw.format and name not in self._quantized:
            self._pending[name] = _Pending(raw, [])
            self._count(math.prod(raw.shape))
            return
        if format in PLAIN:
            result = RawTensor({VALUES: empty(raw.shape, format)}, format, raw.shape)
            self.expanded_bytes += result.nbytes
        else:
            result = quantized_empty(raw.shape, format)
        pieces = [
            self._pool.submit(
                self._convert, name, raw.rows(rows), self._quantized.get(name), result.rows(rows)
            )
            for rows in row_runs(raw.shape, PIECE_VALUES)
        ]
        self._pending[name] = _Pending(result, pieces)

    def _convert(self, name: str, raw: RawTensor, quantized: str | None, out: RawTensor) -> None:
        """Convert some rows of a tensor to the format of `out`, and count them as done. With
        `quantized`, quantize them to that format first."""
        if quantized and quantized != out.format:
            blocks = quantized_empty(raw.shape, quantized)
            self._quantize(name, raw, blocks)
            raw = blocks
        if out.format in PLAIN:
            unpack_into(raw, out.parts[VALUES], out.format)
        else:
            self._quantize(name, raw, out)
        self._count(math.prod(raw.shape))

    @staticmethod
    def _quantize(name: str, raw: RawTensor, out: RawTensor) -> None:
        try:
            quantize_into(raw, out)
        except ValueError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error

    def _release(self, name: str) -> None:
        if self._copied and name:
            self._checkpoint.release(name)

    def _count(self, values: int) -> None:
        with self._lock:
            self._done += values
            self._progress(self._done / self._total)
