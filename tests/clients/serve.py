"""Serve the agents' model through a real gateway.

A program: prints the gateway's URL and serves until its standard input ends. Arguments: the folder
for records and the database, the context length, seconds per token, and the gateway's other
settings as JSON.
"""

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from fakes.agent_model import AgentModel
from fakes.router_process import serve_router
from systems.gateway_process import GatewayProcess

READY_S = 60.0


def wait_until_ready(url: str) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=READY_S).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


async def serve(folder: Path, context_len: int, token_s: float, settings: dict[str, Any]) -> None:
    model = AgentModel(folder / "notes.jsonl", context_len, token_s)
    _, host, address = await serve_router(model)
    database = f"sqlite:///{folder / 'gateway.db'}"
    with GatewayProcess(address, database_url=database, **settings) as gateway:
        await asyncio.to_thread(wait_until_ready, gateway.url)
        print(json.dumps({"url": gateway.url}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await host.stop(0)


if __name__ == "__main__":
    asyncio.run(
        serve(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), json.loads(sys.argv[4]))
    )
