"""`pdserve up` with one prefill worker: long requests over cuda_ipc get the tokens and the
log-probabilities of a system whose decode worker computes prompts, and the rings follow the
rules."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from part import MeasuredPart, run
from random_models import FAKE_QWEN3, QWEN3_0_6B, write_checkpoint
from systems.fleet import Fleet

Answer = tuple[list[int], Any]  # token ids, log-probabilities


def measure(part: MeasuredPart) -> None:
    hf_config = FAKE_QWEN3 if part.fake else QWEN3_0_6B
    model = write_checkpoint(part.folder / "served", hf_config)
    count, least, most, new = (6, 40, 200, 8) if part.fake else (64, 1200, 3500, 64)
    bodies = requests(count, least, most, new, hf_config["vocab_size"])
    transport = "shm" if part.fake else "cuda_ipc"
    rings = part.folder / "rings"
    rings.mkdir(exist_ok=True)
    common = ["--model", str(model), "--decode", "1", "--open-metrics"]
    if part.fake:
        common += ["--device", "cpu", "--threads", "1", "--kv-tokens", "4096"]
    else:
        common += ["--device", "cuda", "--kv-tokens", "131072"]
    apart = ["--prefill", "1", "--remote-prefill", "always", "--kv-transport", transport]
    with Fleet(*common, *apart, "--trace-dir", str(rings), timeout_s=part.left_s) as fleet:
        part.note(ready_s=fleet.ready_s)
        split = answers(fleet, bodies)
        moved = fleet.metric("pdserve_transfer_bytes_total", transport=transport)
        remote = fleet.prefills("remote")
    part.note(requests=count, remote=remote, transport=transport, bytes=int(moved))
    command = [sys.executable, "-m", "pdserve.cli.main", "replay", "--check", str(rings)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    part.note(replay=(checked.stdout + checked.stderr)[-500:], replay_code=checked.returncode)
    with Fleet(*common, "--prefill", "0", timeout_s=part.left_s) as fleet:
        mixed = answers(fleet, bodies)
    unlike = [n for n, pair in enumerate(zip(split, mixed, strict=True)) if pair[0] != pair[1]]
    part.note(tokens=sum(len(ids) for ids, _ in mixed), tokens_requested=count * new)
    part.note(unlike_mixed_mode=unlike)


def requests(count: int, least: int, most: int, new: int, vocab: int) -> list[dict[str, Any]]:
    """The requests; every other one requests log-probabilities, and so is no plain row."""
    rng = np.random.default_rng(3)
    found = []
    for n in range(count):
        ids = rng.integers(0, vocab, rng.integers(least, most))
        body = {"prompt": list(map(int, ids)), "max_tokens": new, "seed": n, "ignore_eos": True}
        body |= {"temperature": 0.6, "return_token_ids": True}
        found.append(body | ({"logprobs": 2} if n % 2 else {}))
    return found


def answers(fleet: Fleet, bodies: list[dict[str, Any]]) -> list[Answer]:
    """The answers. Raises httpx.HTTPStatusError if one is refused."""
    with httpx.Client(base_url=fleet.url, timeout=300) as client, ThreadPoolExecutor(16) as threads:
        name = client.get("/v1/models").json()["data"][0]["id"]

        def ask(body: dict[str, Any]) -> Answer:
            answer = client.post("/v1/completions", json=body | {"model": name})
            answer.raise_for_status()
            (choice,) = answer.json()["choices"]
            return choice["token_ids"], choice["logprobs"]

        return list(threads.map(ask, bodies))


if __name__ == "__main__":
    run(measure)
