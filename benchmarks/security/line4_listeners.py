"""Line 4: connections that are held open do not affect other clients.

While one address holds IDLE silent sockets to a port of each kind, then while decode has no file
descriptor left, then while clients are sending UNFINISHED bodies of BODY bytes to the gateway, long
prompts are still prefilled remotely and answered. Requests without room are answered 429 or 503.
BACK_S after each, a prompt is handed off, each port answers, and the gateway has the memory and the
descriptors that it had before.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.listening import listening

from pdserve.gateway.settings import GatewaySettings

IDLE, WAITING, UNFINISHED, BODY, PIECE = 1000, 130, 500, 8 << 20, 1 << 18
MOST_BYTES, BACK_S = 256 << 20, 20.0
LEFT_BYTES, LEFT_FDS = 64 << 20, 10  # that the gateway may keep: its allocator, new connections
CONNECT_S, ANSWERED_S = 3.0, 20.0  # for the answers to bodies without room
STRANGER = "127.0.0.9"  # the address of the clients that only hold sockets
ROOM = GatewaySettings().max_bodies_bytes // BODY
MODEL = "SmolLM2-135M-Instruct"
KEY = {"authorization": "Bearer good"}
asked = iter(range(10**9))


def long_prompt(fleet: Fleet) -> int:
    """Remote prefills for one long prompt: 1, or 0."""
    before = fleet.prefills("remote")
    body = {"model": MODEL, "prompt": f"{next(asked)} and so on " * 120, "max_tokens": 2}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=KEY, timeout=60)
    answer.raise_for_status()
    return fleet.prefills("remote") - before


def kv_port(fleet: Fleet) -> tuple[str, int]:
    """The port on which decode receives hand-offs: prefill has a connection to it."""
    prefill = psutil.Process(fleet.pids("prefill")[0])
    decode = psutil.Process(fleet.pids("decode")[0])
    listening = {c.laddr.port for c in decode.net_connections() if c.status == "LISTEN"}
    held = {c.raddr.port for c in prefill.net_connections() if c.raddr and c.laddr.port}
    (port,) = listening & held
    return "127.0.0.1", port


@contextmanager
def silent(address: tuple[str, int], count: int) -> Iterator[Counter[str]]:
    """This many silent sockets from a separate address: the number connected, and the number
    waiting, since they are not accepted."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind((STRANGER, 0))
            sock.setblocking(False)
            sock.connect_ex(address)
        deadline = time.monotonic() + CONNECT_S
        while not all(map(connected, socks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield Counter("connected" if connected(sock) else "waits" for sock in socks)


def connected(sock: socket.socket) -> bool:
    with suppress(OSError):
        return bool(sock.getpeername())
    return False


class Calm:
    """The gateway's state before connections were held open."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._gateway = psutil.Process(fleet.pids("gateway")[0])
        self._bytes, self._fds = self._gateway.memory_info().rss, self._gateway.num_fds()
        self._most = self._bytes

    def look(self) -> None:
        self._most = max(self._most, self._gateway.memory_info().rss)

    def is_back(self) -> dict[str, Any]:
        """The time until a remote prefill succeeds, and the resources still in use BACK_S from
        now."""
        began = time.monotonic()
        wait_until(lambda: long_prompt(self._fleet), "a remote prefill", 60.0, 0.5)
        back = time.monotonic() - began
        time.sleep(max(0.0, began + BACK_S - time.monotonic()))
        left = self._gateway.memory_info().rss - self._bytes
        fds = self._gateway.num_fds() - self._fds
        grown = self._most - self._bytes
        remote = long_prompt(self._fleet)
        return {
            "ok": back < BACK_S and left < LEFT_BYTES and fds < LEFT_FDS and grown < MOST_BYTES
            and remote == 1 and answers(self._fleet),
            "remote_prefill_after_s": round(back, 1),
            "gateway_grown_mib": round(grown / 2**20),
            "gateway_left_mib": round(left / 2**20),
            "gateway_left_fds": fds,
        }  # fmt: skip


def answers(fleet: Fleet) -> bool:
    """Whether HTTP and gRPC answer at the ports for clients."""
    with grpc.insecure_channel(fleet.grpc) as text, grpc.insecure_channel(fleet.router) as ids:
        for channel in (text, ids):
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return httpx.get(f"{fleet.url}/health", timeout=5).is_success


def ports(fleet: Fleet) -> dict[str, tuple[str, int]]:
    """One port of each kind."""
    (decode,) = fleet.blocks().keys() & listening(psutil.Process(fleet.pids("decode")[0]))
    places = {
        "HTTP": fleet.url.removeprefix("http://"),
        "gRPC of the gateway": fleet.grpc,
        "gRPC of the router": fleet.router,
        "gRPC of decode": decode,
    }
    split = {name: place.split(":") for name, place in places.items()}
    return {name: (host, int(port)) for name, (host, port) in split.items()}


def new_prefill(fleet: Fleet) -> float:
    """Seconds until a newly started prefill worker is connected and has handed a prompt off."""
    victim = fleet.pids("prefill")[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: fleet.pids("prefill") not in ([], [victim]), "a new prefill")
    began = time.monotonic()
    wait_until(lambda: long_prompt(fleet), "a remote prefill", 60.0, 0.5)
    return time.monotonic() - began


def idle_sockets(fleet: Fleet, address: tuple[str, int], at_kv: bool = False) -> dict[str, Any]:
    calm = Calm(fleet)
    with silent(address, IDLE) as outcomes:
        remote = sum(long_prompt(fleet) for _ in range(5))
        calm.look()
        # A newly started prefill worker has to connect through the same port.
        new_s = new_prefill(fleet) if at_kv else 0.0
    back = calm.is_back()
    return {
        "ok": outcomes == {"connected": IDLE} and remote == 5 and new_s < BACK_S and back["ok"],
        "sockets": dict(outcomes),
        "remote_of_5": remote,
        "new_prefill_after_s": round(new_s, 1),
        "after": back,
    }


def no_descriptors(fleet: Fleet) -> dict[str, Any]:
    """Decode cannot open another file, and sockets wait for it to accept them."""
    address, decode = kv_port(fleet), psutil.Process(fleet.pids("decode")[0])
    calm, before = Calm(fleet), decode.rlimit(resource.RLIMIT_NOFILE)
    decode.rlimit(resource.RLIMIT_NOFILE, (decode.num_fds(), before[1]))
    try:
        with silent(address, WAITING) as outcomes:
            wait_until(lambda: "Too many open files" in fleet.log(), "a line of the log")
            remote = sum(long_prompt(fleet) for _ in range(5))
    finally:
        decode.rlimit(resource.RLIMIT_NOFILE, before)
    new_s = new_prefill(fleet)
    back = calm.is_back()
    return {
        "ok": outcomes["connected"] > 0 and remote == 5 and new_s < BACK_S and back["ok"],
        "sockets": dict(outcomes),
        "remote_of_5": remote,
        "new_prefill_after_s": round(new_s, 1),
        "after": back,
    }


async def unfinished(place: str) -> str:
    """The status of a request whose body, except the last byte, is sent as fast as it is
    accepted."""
    host, _, port = place.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def send() -> None:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {place}\r\nContent-Length: {BODY}\r\n"
            "Content-Type: application/json\r\nAuthorization: Bearer flood\r\n\r\n".encode()
        )
        for left in range(BODY - 1, 0, -PIECE):
            writer.write(b" " * min(left, PIECE))
            await writer.drain()

    sending = asyncio.create_task(send())
    try:
        return (await reader.readuntil(b"\r\n")).decode().split(" ")[1]
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        sending.cancel()
        with suppress(OSError, asyncio.CancelledError):
            await sending
        writer.transport.abort()


async def hold_bodies(fleet: Fleet, calm: Calm) -> tuple[Counter[str], int]:
    """The answers, "none" for those whose body is incomplete; and the number of requests of others
    that were prefilled remotely meanwhile."""
    place = fleet.url.removeprefix("http://")
    clients = [asyncio.create_task(unfinished(place)) for _ in range(UNFINISHED)]
    asked = asyncio.create_task(asyncio.to_thread(long_prompt, fleet))
    until = time.monotonic() + ANSWERED_S
    while not asked.done() or time.monotonic() < until:
        calm.look()
        if asked.done() and sum(client.done() for client in clients) >= UNFINISHED - ROOM:
            break
        await asyncio.sleep(0.05)
    statuses = Counter(client.result() if client.done() else "none" for client in clients)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return statuses, await asked


def unfinished_bodies(fleet: Fleet) -> dict[str, Any]:
    calm = Calm(fleet)
    statuses, remote = asyncio.run(hold_bodies(fleet, calm))
    back = calm.is_back()
    return {
        "ok": remote == 1 and back["ok"] and statuses.keys() <= {"none", "429", "503"}
        and 0 < statuses["none"] <= ROOM,
        "answers": dict(statuses),
        "room": ROOM,
        "remote_meanwhile": remote,
        "after": back,
    }  # fmt: skip


def main() -> None:
    keys = ("--api-key", "good", "--api-key", "flood")
    with Fleet(*keys, "--kv-transport", "tcp", "--open-metrics", certificates=True) as fleet:
        assert long_prompt(fleet) == 1
        found = {f"idle sockets at {n}": idle_sockets(fleet, a) for n, a in ports(fleet).items()}
        found |= {
            "idle sockets at the KV port": idle_sockets(fleet, kv_port(fleet), at_kv=True),
            "no descriptors": no_descriptors(fleet),
            "unfinished bodies": unfinished_bodies(fleet),
        }
    print(json.dumps({"ok": all(part["ok"] for part in found.values()), **found}))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    main()
