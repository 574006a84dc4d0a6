"""A pool of Llama-8B's shape sent between processes by cuda_ipc and by tcp: bytes and speed, and
tags that detect a changed bit."""

import os
import random
import time
from typing import Any

from part import MeasuredPart, run
from sides import Children, Side, Taker, listen, tell


def measure(part: MeasuredPart) -> None:
    blocks, rounds = (3, 1) if part.fake or part.smallest else (256, 5)
    side = Side(part.fake, str(part.folder), blocks)
    part.note(hash=hashes(side, 2 if part.smallest or part.fake else 20))
    if not part.smallest:
        part.note(transfer=transfers(side, blocks, rounds), context_alive=side.alive())


def hashes(side: Side, count: int) -> dict[str, Any]:
    """The device's tag of random blocks equals the host's; a changed bit in the slot is
    detected."""
    import numpy as np

    from pdserve.engine.transport.device import Slot
    from pdserve.kernels import _native
    from pdserve.kernels.copy_hash import TAG_BYTES, expand_key

    rng = random.Random(1)
    capacity = side.options.device_slot_bytes
    memory = side.device.allocate(capacity + 256)
    slot = Slot(memory.address, capacity, side.device.make_signal())
    side.fill(1)
    compared = equal = found = 0
    block_bytes = side.spec.groups[0].block_bytes(32)
    for number in range(count):
        layers = range(rng.randrange(0, 8), rng.randrange(8, 17))
        most = min(side.kv.num_blocks[0], capacity // (len(layers) * block_bytes))
        blocks = rng.sample(range(1, side.kv.num_blocks[0] + 1), rng.randrange(1, most + 1))
        pages, key = side.kv.pages(0, layers, blocks, side.kv.ready()), side.key.copy_key(number)
        side.device.copy_out(pages, slot, key).wait()
        tag = side.device.get(memory.address + capacity, TAG_BYTES)
        payload = bytearray(b"".join(side.kv.read(0, layers, blocks)))
        data, copied = np.frombuffer(payload, np.uint8), np.zeros(len(payload), np.uint8)
        numbers = _native.copy_and_hash(
            data, len(payload), len(payload), 0, 1, np.zeros(1, np.int32), copied,
            expand_key(key), True,
        )  # fmt: skip
        compared += 1
        equal += tag == b"".join(n.to_bytes(8, "little") for n in numbers)
        copy = side.device.copy_in(pages, slot, key)
        copy.wait()
        equal -= not copy.intact
        at = memory.address + rng.randrange(len(payload))
        changed = bytes([side.device.get(at, 1)[0] ^ 1 << rng.randrange(8)])
        side.device.put(at, changed)
        copy = side.device.copy_in(pages, slot, key)
        copy.wait()
        found += not copy.intact
    blocks = list(range(1, min(side.kv.num_blocks[0], capacity // (32 * block_bytes)) + 1))
    whole = side.kv.pages(0, range(32), blocks, side.kv.ready())
    speed = {}
    for name, give in (
        ("pool_to_slot", side.device.copy_out),
        ("slot_to_pool", side.device.copy_in),
    ):
        give(whole, slot, bytes(32)).wait()
        start = time.perf_counter()
        for _ in range(count):
            last = give(whole, slot, bytes(32))
        last.wait()
        speed[f"{name}_gb_s"] = count * whole.num_bytes / (time.perf_counter() - start) / 1e9
    side.device.release(slot)
    slot.signal.close()
    memory.close()
    right = equal == compared == found
    return {"compared": compared, "equal": right, "changed_bits_found": found, **speed}


def transfers(side: Side, blocks: int, rounds: int) -> dict[str, Any]:
    """A whole pool from another process by both transports: bytes and times."""
    result: dict[str, Any] = {}
    side.fill(7)
    expected = [data.clone() for data in side.pools]
    total = sum(data[:, 1:].numel() * data.element_size() for data in expected)
    start_copy = [data.clone() for data in expected]
    side.wait()
    start = time.perf_counter()
    for _ in range(10):
        for source, target in zip(expected, start_copy, strict=True):
            target.copy_(source)
    side.wait()
    bytes_copied = 10 * sum(d.numel() * d.element_size() for d in expected)
    result["device_to_device_gb_s"] = bytes_copied / (time.perf_counter() - start) / 1e9
    del start_copy
    children = Children(side, "prefill", blocks, 1)
    equal = True
    for name in ("cuda_ipc", "tcp"):
        incarnation, taker = os.urandom(16), Taker(side)
        listener = listen(side, name, incarnation, taker)
        process, _ = children.next(0)
        address = listener.address if name == "tcp" else "-"
        speeds = []
        tell(process, name, address, incarnation.hex(), 7, rounds)
        for number in range(rounds):
            side.clear()
            side.wait()
            taker.first = 0.0
            if number:
                tell(process, "again")
            first = taker.arrived.get(timeout=120)
            taker.arrived.put(first)  # now the size of its frames is known
            count = -(-total // first[1].payload_bytes)
            taken, damaged = taker.take(count)
            side.wait()
            speeds.append(total / (time.perf_counter() - taker.first) / 1e9)
            pairs = zip(expected, side.pools, strict=True)
            same = all(side.equal(a[:, 1:], b[:, 1:]) for a, b in pairs)
            equal = equal and same and damaged == 0 and taken == count
        process.kill()
        process.communicate()
        listener.close()
        result[f"{name}_gb_s"] = sorted(speeds)
    result["equal"] = equal
    result["bytes"] = total
    result["of_device_to_device"] = result["cuda_ipc_gb_s"][-1] / result["device_to_device_gb_s"]
    return result


if __name__ == "__main__":
    run(measure)
