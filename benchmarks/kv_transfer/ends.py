"""The two processes of a transfer (end.py), driven from a third; and two networks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMESPACES = ("pdserve-bench-a", "pdserve-bench-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")


class End:
    """One process, on one core, in a network namespace if one is given."""

    def __init__(self, role: str, transport: str, folder: str, **where: Any) -> None:
        cores = sorted(os.sched_getaffinity(0))
        core = cores[-1 if role == "prefill" else 0]
        inside = ["ip", "netns", "exec", where["namespace"]] if "namespace" in where else []
        command = [
            *inside, "taskset", "-c", str(core), sys.executable, "-m", "kv_transfer.end",
            role, transport, folder, where.get("bind", "127.0.0.1"), *where.get("words", ()),
        ]  # fmt: skip
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, text=True, env=env, **pipes)  # type: ignore[call-overload]
        self.hello = self.answer()

    def ask(self, do: str, **words: Any) -> None:
        self._process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def call(self, do: str, **words: Any) -> dict[str, Any]:
        self.ask(do, **words)
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ends:
    """A pair. `address` and `bare`: where prefill connects, if not directly to decode."""

    def __init__(
        self, transport: str, folder: str, decode: Any = None, prefill: Any = None, **both: Any
    ) -> None:
        self.decode = End("decode", transport, folder, **(decode or {}), **both)
        self.prefill = End("prefill", transport, folder, **(prefill or {}), **both)
        self.address: str = self.decode.hello["address"]
        self.bare_address: str = self.decode.hello["bare"]

    def bare(self) -> float:
        """Bytes per second of a plain socket's copy: from pool to pool, one stream, its end seen by
        one byte back."""
        self.decode.ask("bare", rounds=1)
        (rate,) = self.prefill.call("bare", address=self.bare_address, rounds=1)["rates"]
        self.decode.answer()
        return float(rate)

    def memcpy(self) -> float:
        return float(self.decode.call("memcpy")["rate"])

    def send(self) -> float:
        """Bytes per second of a hand-off, from the end of the last chunk to decode's Complete;
        every byte of the pool is compared afterwards. Raises AssertionError."""
        self.decode.call("clear")
        ticket = self.decode.call("admit", prefill=self.prefill.hello["incarnation"])
        incarnation = self.decode.hello["incarnation"]
        sent = self.prefill.call("send", address=self.address, decode=incarnation, **ticket)
        assert (sent["reason"], sent["resent"]) == ("", 0), sent
        there, here = (end.call("digest")["digest"] for end in (self.prefill, self.decode))
        assert there == here, "other bytes have arrived"
        return float(sent["rate"])

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


def no_networks() -> str:
    """The reason why two network namespaces cannot be created here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    try:
        with networks("1gbit"):
            return ""
    except FileNotFoundError as err:
        return f"no {err.filename}"
    except subprocess.CalledProcessError as err:
        return f"{' '.join(err.cmd)}: {err.stderr.strip()}"


@contextmanager
def networks(rate: str) -> Iterator[None]:
    """Two namespaces, a veth between them, and `rate` (tc tbf) on the way from the first."""
    one, other = NAMESPACES
    try:
        for name in NAMESPACES:
            _run("ip", "netns", "add", name)
        _run(
            *("ip", "link", "add", "pdb0", "netns", one, "type", "veth"),
            *("peer", "name", "pdb1", "netns", other),
        )
        for name, link, address in zip(NAMESPACES, ("pdb0", "pdb1"), ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            _run("ip", "-n", name, "link", "set", link, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            *("tc", "-n", one, "qdisc", "add", "dev", "pdb0", "root", "tbf"),
            *("rate", rate, "burst", "4mb", "latency", "100ms"),
        )
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
