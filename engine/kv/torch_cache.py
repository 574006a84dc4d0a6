"""KV pools whose layers are tensors, in host memory or on a CUDA device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, LayerGroup


class TorchKvCache(KvCache):
    """A pool in host memory, which the tensors share."""

    def layer(self, n: int) -> tuple[Tensor, int]:
        data, group = super().layer(n)
        return torch.from_numpy(data).view(getattr(torch, self.spec.groups[group].dtype)), group


class DeviceKvCache(KvCache):
    """A pool on a CUDA device. The model runs on `stream`; reads and writes of KV transfers go
    through pinned memory on a separate stream, so that they overlap with steps."""

    def __init__(
        self, spec: KvSpec, num_blocks: Sequence[int], stream: torch.cuda.Stream | None = None
    ) -> None:
        """`stream`: None selects the current stream of this thread."""
        self.device = torch.cuda.current_device()
        self._compute_stream = stream or torch.cuda.current_stream()
        self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        super().__init__(spec, num_blocks)

    def read(self, group: int, layers: range, blocks: Sequence[int]) -> list[memoryview]:
        """Wait for everything launched before; the bytes include it."""
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        if not blocks or not layers:
            return []
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_stream(self._compute_stream)
            index = self._index(blocks)
            selected = self._bytes[group][layers.start : layers.stop].index_select(1, index)
            pinned = torch.empty(selected.shape, dtype=selected.dtype, pin_memory=True)
            pinned.copy_(selected, non_blocking=True)
            self._copy_stream.synchronize()
        return [layer.flatten().numpy().data for layer in pinned]

    def write(self, group: int, layers: range, blocks: Sequence[int], payload: memoryview) -> None:
        """Queue the copy like KvCache.write: later computation waits for it."""
        self._check(group, layers, blocks, payload.nbytes)
        if not blocks or not layers:
            return
        pinned = torch.empty(payload.nbytes, dtype=torch.uint8, pin_memory=True)
        pinned.numpy().data[:] = payload
        with torch.cuda.stream(self._copy_stream):
            # The computation may still read the old contents.
            self._copy_stream.wait_stream(self._compute_stream)
            rows = pinned.to(self._device_name, non_blocking=True).view(
                len(layers), len(blocks), -1
            )
            index = self._index(blocks)
            self._bytes[group][layers.start : layers.stop].index_copy_(1, index, rows)
        self._compute_stream.wait_stream(self._copy_stream)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        with torch.cuda.stream(self._compute_stream):
            super().copy(copies)

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Upload block numbers from pinned memory, so that the copy does not wait for the
        stream."""
        pinned = torch.empty(len(blocks), dtype=torch.int64, pin_memory=True)
        pinned.copy_(torch.tensor(list(blocks)))
        return pinned.to(self._device_name, non_blocking=True)

    def ready(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._compute_stream)
        return event

    @property
    def _device_name(self) -> str:
        return f"cuda:{self.device}"

    def _zeros(self, shape: tuple[int, ...], group: LayerGroup) -> Tensor:
        dtype = getattr(torch, group.dtype)
        with torch.cuda.stream(self._compute_stream):
            return torch.zeros(shape, dtype=dtype, device=self._device_name)

    def _as_bytes(self) -> list[Any]:
        return [data.view(*data.shape[:2], -1).view(torch.uint8) for data in self.data]

    def _address(self, group: int) -> tuple[int, int]:
        return self._bytes[group].data_ptr(), self._bytes[group].stride(0)
