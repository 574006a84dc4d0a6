"""A pool on a device whose streams only record their waits: bytes are copied between the right two
waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fakes.decoder import fake_spec

from pdserve.engine.kv import BlockCopy, torch_cache
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.kv.torch_cache import DeviceKvCache

COMPUTE, COPY = "compute", "copy"


class FakeStream:
    def __init__(self, name: str, world: "FakeTorch") -> None:
        self.name = name
        self._world = world

    def wait_stream(self, other: "FakeStream") -> None:
        self._world.note(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self._world.note(f"host waits for {self.name}")


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name


class FakeTorch:
    """Replaces torch; the device is host memory, and `cuda` is the object itself."""

    def __init__(self) -> None:
        self.cuda = self
        self.notes: list[tuple[str, str, bytes]] = []  # operation, stream, bytes of the pool
        self.pool: torch.Tensor | None = None
        self.current = COMPUTE
        self.computing = FakeStream(COMPUTE, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def note(self, what: str) -> None:
        assert self.pool is not None
        self.notes.append((what, self.current, self.pool.numpy().tobytes()))

    def current_device(self) -> int:
        return 0

    def current_stream(self) -> FakeStream:
        return self.computing

    def Stream(self) -> FakeStream:
        return FakeStream(COPY, self)

    Event = FakeEvent

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def empty(self, *shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return torch.empty(*shape, **options)

    def zeros(self, shape: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert self.current == COMPUTE
        self.pool = torch.zeros(shape, dtype=dtype)
        return self.pool


class HostDeviceCache(DeviceKvCache):
    _device_name = "cpu"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(torch_cache, "torch", fake)
    return fake


def payload_of(kv: KvCache, blocks: list[int]) -> bytes:
    size = kv.num_bytes(0, range(1), blocks)
    return bytes(n % 251 for n in range(size))


def test_a_write_lies_between_two_waits(world: FakeTorch) -> None:
    kv, blocks = HostDeviceCache(fake_spec(4), [9]), [3, 7, 4]
    payload = payload_of(kv, blocks)
    kv.write(0, range(1), blocks, memoryview(payload))
    (before, first, old), (after, second, new) = world.notes
    assert (before, first) == ("copy waits for compute", COPY)
    assert (after, second) == ("compute waits for copy", COMPUTE)
    assert not any(old)
    plain = KvCache(fake_spec(4), [9])
    plain.write(0, range(1), blocks, memoryview(payload))
    assert new == plain.data[0].tobytes()


def test_a_read_waits_for_launched_work_and_then_for_the_copy(world: FakeTorch) -> None:
    kv, blocks = HostDeviceCache(fake_spec(4), [9]), [2, 1, 8]
    payload = payload_of(kv, blocks)
    kv.write(0, range(1), blocks, memoryview(payload))
    world.notes.clear()
    assert b"".join(kv.read(0, range(1), blocks)) == payload
    assert [note[:2] for note in world.notes] == [
        ("copy waits for compute", COPY),
        ("host waits for copy", COPY),
    ]
    assert kv.read(0, range(1), []) == []


def test_the_compute_stream_copies_blocks_and_pages_wait_for_it(world: FakeTorch) -> None:
    kv = HostDeviceCache(fake_spec(4), [9])
    kv.write(0, range(1), [2], memoryview(payload_of(kv, [2])))
    kv.copy([BlockCopy(0, 2, 5)])
    assert kv.read(0, range(1), [5])[0] == payload_of(kv, [2])
    ready = kv.ready()
    assert ready.stream == COMPUTE
    assert kv.pages(0, range(1), [2], ready).ready is ready


def test_wrong_blocks_are_refused_before_any_wait(world: FakeTorch) -> None:
    kv = HostDeviceCache(fake_spec(4), [9])
    with pytest.raises(ValueError, match="outside the pool"):
        kv.read(0, range(1), [10])
    with pytest.raises(ValueError, match="bytes do not match"):
        kv.write(0, range(1), [1], memoryview(b"short"))
    assert not world.notes
