"""The parts of the CUDA shell that can be tested without a GPU: when it opens, and that CuPy has
every function it calls.

`make bench-gpu` tests it on a GPU.
"""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.engine_kit import fake_engine
from fakes.decoder import fake_spec

from pdserve.engine.kv.cache import KvCache
from pdserve.engine.transport import DeviceError
from pdserve.engine.transport.cuda_ipc import device_cupy


def cuda_pool(head_dim: int = 64) -> Any:
    """Return the part of a pool that the opener reads."""
    group = SimpleNamespace(block_bytes=lambda block_size: 2 * block_size * head_dim)
    spec = SimpleNamespace(groups=(group,), block_size=1)
    return SimpleNamespace(device=0, spec=spec)


def test_a_pool_in_host_memory_has_no_device() -> None:
    assert device_cupy.opener(fake_engine().kv, encrypted=False) is None


@pytest.mark.parametrize(
    ("pool", "encrypted", "reason", "text"),
    [
        (cuda_pool(), True, "encrypted", "cannot be encrypted"),
        (cuda_pool(5), False, "no_device", "10 bytes, which is not a multiple of 16"),
        (cuda_pool(), False, "no_device", r"needs CuPy: pip install 'pdserve\[cuda\]'"),
    ],
)
def test_reasons_for_not_opening_a_device(
    pool: Any, encrypted: bool, reason: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if CuPy were not installed
    open_device = device_cupy.opener(pool, encrypted=encrypted)
    assert open_device is not None
    with pytest.raises(DeviceError, match=text) as caught:
        open_device()
    assert caught.value.reason == reason


def test_addresses_of_the_blocks_of_a_pool() -> None:
    kv = KvCache(fake_spec(), [9])
    pages = kv.pages(0, range(1), [3, 5])
    data = kv.data[0]
    assert pages.num_bytes == kv.num_bytes(0, range(1), [3, 5])
    assert pages.base + 3 * pages.block_bytes == data[0, 3].ctypes.data
    assert pages.layer_bytes == data[0].nbytes
    assert pages.ready is None
    for layers, blocks in ((range(99), [1]), (range(1), [0]), (range(1), [10]), (range(0), [1])):
        with pytest.raises(ValueError):
            kv.pages(0, layers, blocks)


def test_cupy_has_every_function_that_is_called() -> None:
    from cupy.cuda import Stream, runtime

    source = Path(device_cupy.__file__).read_text()
    names = set(
        re.findall(r"(?<!kernels\.)cuda\.(?!current|get_device|Event)([a-z]\w+)", source)
    ) - {
        "runtime",
        "launch",
    }
    assert len(names) > 15
    assert hasattr(Stream, "from_external")
    assert {name for name in names if not hasattr(runtime, name)} == set()
