"""A process of fake workers: `fake_fleet.py CERTIFICATES SHAPE FILE ROUTER...`.

SHAPE is a Shape as JSON. It prints `ready` when all listen, and exits on SIGTERM, writing the
arrival time (time.monotonic) of each Admit by request to FILE, as JSON.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop
from scale.card import model
from scale.fake_worker import Exchange, FakeDecode, FakePrefill
from scale.processes import files_of
from scale.shape import Shape

from pdserve.services.common.auth import Role, TlsAccess


async def run(certificates: Path, shape: Shape, routers: list[str]) -> dict[str, float]:
    """Run the workers; returns the arrival time of each Admit."""
    card, blobs = model()
    exchange = Exchange()
    decode = TlsAccess(*files_of(certificates, Role.DECODE))
    prefill = TlsAccess(*files_of(certificates, Role.PREFILL))
    workers = [
        *(FakeDecode(n, decode, card, shape, exchange) for n in range(shape.decodes)),
        *(FakePrefill(n, prefill, card, shape, exchange) for n in range(shape.prefills)),
    ]
    for worker in workers:
        await worker.start(routers, blobs.get)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    return exchange.admitted


def main() -> None:
    certificates, text, file, *routers = sys.argv[1:]
    shape = Shape.from_json(text)
    admitted = uvloop.run(run(Path(certificates), shape, routers))
    Path(file).write_text(json.dumps(admitted))
    os._exit(0)  # hundreds of threads without data to save


if __name__ == "__main__":
    main()
