"""KV pools whose layers are tensors: in the memory of the host, or on a CUDA device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.spec import KvSpec, LayerGroup


class TorchKvCache(KvCache):
    """A pool on the host; the tensors share its memory."""

    def layer(self, n: int) -> tuple[Tensor, int]:
        data, group = super().layer(n)
        return torch.from_numpy(data).view(getattr(torch, self.spec.groups[group].dtype)), group


class DeviceKvCache(KvCache):
    """A pool on a CUDA device; copies run on the stream of the thread that computes."""

    def __init__(self, spec: KvSpec, num_blocks: Sequence[int]) -> None:
        self.device = torch.cuda.current_device()
        super().__init__(spec, num_blocks)

    def read(self, group: int, layers: range, blocks: Sequence[int]) -> list[memoryview]:
        self._check(group, layers, blocks, self.num_bytes(group, layers, blocks))
        source = self._bytes[group]
        index = torch.tensor(list(blocks), device=source.device)
        copies = [source[layer].index_select(0, index).cpu() for layer in layers]
        return [copy.flatten().numpy().data for copy in copies if blocks]

    def write(self, group: int, layers: range, blocks: Sequence[int], payload: memoryview) -> None:
        self._check(group, layers, blocks, payload.nbytes)
        if not blocks or not layers:
            return
        target = self._bytes[group]
        # torch cannot wrap read-only memory; such a payload takes one more copy.
        data = bytearray(payload) if payload.readonly else payload
        rows = torch.frombuffer(data, dtype=torch.uint8).view(len(layers), len(blocks), -1)
        moved = rows.to(target.device)
        index = torch.tensor(list(blocks), device=target.device)
        for i, layer in enumerate(layers):
            target[layer].index_copy_(0, index, moved[i])

    def _zeros(self, shape: tuple[int, ...], group: LayerGroup) -> Tensor:
        dtype = getattr(torch, group.dtype)
        return torch.zeros(shape, dtype=dtype, device=f"cuda:{self.device}")

    def _as_bytes(self) -> list[Any]:
        return [data.view(*data.shape[:2], -1).view(torch.uint8) for data in self.data]

    def _address(self, group: int) -> tuple[int, int]:
        return self._bytes[group].data_ptr(), self._bytes[group].stride(0)

    def _ready(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event
