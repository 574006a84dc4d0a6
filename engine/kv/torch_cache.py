"""KV pools for backends that use torch: their layers are tensors, in host memory or on a CUDA
device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.kv.block_pool import BlockCopy
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, LayerGroup


class TorchKvCache(KvCache):
    """KV pool in host memory whose layers are torch tensors that share the pool's memory."""

    def layer(self, n: int) -> tuple[Tensor, int]:
        data, group = super().layer(n)
        return torch.from_numpy(data).view(getattr(torch, self.spec.groups[group].dtype)), group


class DeviceKvCache(KvCache):
    """KV pool on a CUDA device. The model runs on one CUDA stream; `read` and `write`, for KV
    transfers, copy through pinned host memory on another stream, so that they overlap with engine
    steps."""

    def __init__(
        self, spec: KvSpec, num_blocks: Sequence[int], stream: torch.cuda.Stream | None = None
    ) -> None:
        """`stream`: the CUDA stream that the model runs on; None selects this thread's current
        stream."""
        self.device = torch.cuda.current_device()
        self._compute_stream = stream or torch.cuda.current_stream()
        self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        super().__init__(spec, num_blocks)

    def read(self, group: int, layers: range, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of whole blocks like KvCache.read. Waits for all work launched before on
        the model's stream, so that the bytes include its results."""
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
        """Queue the copy of `payload` into whole blocks, like KvCache.write; computation launched
        later waits for the copy."""
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
        """Upload block numbers to the device through pinned host memory, so that the caller need
        not wait for the stream."""
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
