"""Line 4: doors that are held open cost nobody else anything.

While one address holds IDLE silent sockets to decode's KV port, then while decode has no file
descriptor left, then while clients have UNFINISHED bodies of BODY bytes open at the gateway, long
prompts go on being prefilled remotely or answered; 20 s after each, all is as before.
"""

import json
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
from eventually import wait_until
from fleet import Fleet

IDLE, UNFINISHED, BODY = 1000, 500, 8 << 20
MOST_BYTES, BACK_S = 256 << 20, 20.0
STRANGER = "127.0.0.9"  # the address of those who only hold sockets
MODEL = "SmolLM2-135M-Instruct"
KEY = {"authorization": "Bearer good"}
asked = iter(range(10**9))


def long_prompt(fleet: Fleet) -> int:
    """How many prompts were prefilled remotely for one long one: 1, or 0."""
    before = fleet.prefills("remote")
    body = {"model": MODEL, "prompt": f"{next(asked)} and so on " * 120, "max_tokens": 2}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=KEY, timeout=60)
    answer.raise_for_status()
    return fleet.prefills("remote") - before


def kv_port(fleet: Fleet) -> tuple[str, int]:
    """Where decode takes hand-offs: the port on which prefill has a connection."""
    prefill = psutil.Process(fleet.pids("prefill")[0])
    decode = psutil.Process(fleet.pids("decode")[0])
    listening = {c.laddr.port for c in decode.net_connections() if c.status == "LISTEN"}
    held = {c.raddr.port for c in prefill.net_connections() if c.raddr and c.laddr.port}
    (port,) = listening & held
    return "127.0.0.1", port


@contextmanager
def silent(address: tuple[str, int], count: int) -> Iterator[Counter[str]]:
    """So many sockets that say nothing, from an address of their own."""
    outcomes: Counter[str] = Counter()
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(5)
            sock.bind((STRANGER, 0))
            try:
                sock.connect(address)
                outcomes["connected"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
        yield outcomes


def idle_sockets(fleet: Fleet) -> dict[str, Any]:
    with silent(kv_port(fleet), IDLE) as outcomes:
        remote = sum(long_prompt(fleet) for _ in range(5))
        # A prefill worker that comes now has to connect through the same port.
        victim = fleet.pids("prefill")[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: fleet.pids("prefill") not in ([], [victim]), "a new prefill")
        began = time.monotonic()
        wait_until(lambda: long_prompt(fleet), "a remote prefill", 60.0, 0.5)
        back = time.monotonic() - began
    return {
        "ok": remote == 5 and back < BACK_S,
        "sockets": dict(outcomes),
        "remote_of_5": remote,
        "new_prefill_after_s": round(back, 1),
    }


def no_descriptors(fleet: Fleet) -> dict[str, Any]:
    """Decode may open no file more, and sockets wait for it to accept them."""
    address, decode = kv_port(fleet), psutil.Process(fleet.pids("decode")[0])
    before = decode.rlimit(resource.RLIMIT_NOFILE)
    decode.rlimit(resource.RLIMIT_NOFILE, (decode.num_fds(), before[1]))
    try:
        with silent(address, 130):
            wait_until(lambda: "Too many open files" in fleet.log(), "a line of the log")
            remote = sum(long_prompt(fleet) for _ in range(5))
    finally:
        decode.rlimit(resource.RLIMIT_NOFILE, before)
    began = time.monotonic()
    victim = fleet.pids("prefill")[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: fleet.pids("prefill") not in ([], [victim]), "a new prefill")
    wait_until(lambda: long_prompt(fleet), "a remote prefill", 60.0, 0.5)
    back = time.monotonic() - began
    return {"ok": remote == 5 and back < BACK_S, "remote_of_5": remote, "back_s": round(back, 1)}


def unfinished_bodies(fleet: Fleet) -> dict[str, Any]:
    """Each sends all of its body but the last byte, as far as it is taken."""
    host, port = fleet.url.removeprefix("http://").split(":")
    gateway = psutil.Process(fleet.pids("gateway")[0])
    before, most, statuses = gateway.memory_info().rss, 0, Counter[str]()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {BODY}\r\n"
        "Content-Type: application/json\r\nAuthorization: Bearer flood\r\n\r\n"
    ).encode()
    piece = b" " * (1 << 20)
    with ExitStack() as stack:
        socks = []
        for _ in range(UNFINISHED):
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            sock.setblocking(False)
            socks.append(sock)
            with_head, left = head, BODY - 1
            while left:
                try:
                    left -= max(0, sock.send(with_head + piece[:left]) - len(with_head))
                    with_head = b""
                except (BlockingIOError, ConnectionError):
                    break
            most = max(most, gateway.memory_info().rss)
        served = httpx.get(f"{fleet.url}/health", timeout=10).status_code
        remote = long_prompt(fleet)
        for sock in socks:
            try:
                line = sock.recv(64).split(b"\r\n")[0].decode()
            except BlockingIOError:
                line = "waits"
            except ConnectionError:
                line = "closed"
            statuses[line.removeprefix("HTTP/1.1 ") or "closed"] += 1
        most = max(most, gateway.memory_info().rss)
    began = time.monotonic()
    wait_until(lambda: long_prompt(fleet), "a remote prefill", 60.0, 0.5)
    back, grown = time.monotonic() - began, most - before
    refused = sum(n for line, n in statuses.items() if line[:3] in ("429", "503"))
    return {
        "ok": served == 200 and remote == 1 and grown < MOST_BYTES and back < BACK_S
        and refused > UNFINISHED / 2,
        "answers": dict(statuses),
        "grown_mib": round(grown / 2**20),
        "back_s": round(back, 1),
    }  # fmt: skip


def main() -> None:
    keys = ("--api-key", "good", "--api-key", "flood")
    with Fleet(*keys, "--kv-transport", "tcp", "--open-metrics", certificates=True) as fleet:
        assert long_prompt(fleet) == 1
        found = {
            "idle sockets": idle_sockets(fleet),
            "no descriptors": no_descriptors(fleet),
            "unfinished bodies": unfinished_bodies(fleet),
        }
    print(json.dumps({"ok": all(part["ok"] for part in found.values()), **found}))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    main()
