"""Two models in one fleet with two prefill and two decode workers each: requests spread over
all."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from builders.tiny_models import write_tiny
from systems.eventually import wait_until
from systems.fleet import Fleet

PROMPTS = [[(7 * i + 13 * k + 1) % 256 for i in range(80)] for k in range(12)]


@pytest.mark.extended
def test_two_models_with_several_workers_each(tmp_path: Path) -> None:
    models = {name: write_tiny(tmp_path / name, name, seed=5) for name in ("llama", "qwen3")}
    options = [word for path in models.values() for word in ("--model", str(path))]
    options += ["--prefill", "2", "--decode", "2", "--remote-prefill", "always", "--threads", "1"]
    options += ["--kv-tokens", "4096", "--weights", "float32"]
    with Fleet(*options) as fleet, httpx.Client(base_url=fleet.url, timeout=60) as http:
        assert {m["id"] for m in http.get("/v1/models").json()["data"]} == set(models)
        unnamed = http.post("/tokenize", json={"prompt": "a"})
        assert unnamed.status_code == 400
        assert unnamed.json()["error"]["param"] == "model"

        def ask(model: str, prompt: list[int]) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
            reply = http.post("/v1/completions", json={**body, "ignore_eos": True})
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == model
            text: str = reply.json()["choices"][0]["text"]
            return text

        requests = [(model, prompt) for prompt in PROMPTS for model in models]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda one: ask(*one), requests))
        assert fleet.prefills("remote") == len(requests)
        assert together[0::2] != together[1::2], "both models gave the same answers"
        assert [ask(*one) for one in requests] == together, "an answer depends on the worker"

        def all_have_worked() -> bool:
            workers = fleet.fleet_view().workers
            moved = [sum(row.bytes for row in worker.load.transports) for worker in workers]
            return len(moved) == 8 and all(moved)

        wait_until(all_have_worked, "each of the eight workers has moved KV")
        wait_until(fleet.all_blocks_back, "blocks back")
    assert fleet.exit_code == 0
