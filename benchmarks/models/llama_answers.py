"""The number of prompts whose first NEW greedy tokens equal llama.cpp's, on real files.

Where an answer differs, the figures have the difference of the two tokens' logits in float32. For
comparison, they have the number of equal answers when llama.cpp runs with another setting that
should not change any: without flash attention, and with prompts computed token by token. Needs
benchmarks/cpu and tests/support in PYTHONPATH.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from builders.engine_kit import ask, run, tokens
from builders.paged_runner import PagedRunner, load_decoder
from peers import PEERS, install_llama
from servers import LlamaServer
from tokenizers import Tokenizer
from weights import gemma_gguf, shipped_gguf

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine
from pdserve.engine.load import open_checkpoint

PROSE = Path(__file__).parents[1] / "text/prose.txt"
PROMPTS, NEW = 20, 32


def prompts(model: Path) -> Iterator[list[int]]:
    """PROMPTS beginnings of paragraphs of prose, of 8 to 100 tokens."""
    text = open_checkpoint(model).text_files()
    tokenizer = Tokenizer.from_str(text.tokenizer_json.decode())
    bos = [text.bos_id] if text.adds_bos and text.bos_id is not None else []
    paragraphs = [p for p in PROSE.read_text().split("\n\n") if len(p) > 300]
    for number in range(PROMPTS):
        ids = tokenizer.encode(paragraphs[number % len(paragraphs)], add_special_tokens=False).ids
        begin = number // len(paragraphs) * 20
        yield bos + ids[begin : begin + 8 + 92 * number // (PROMPTS - 1)]


def theirs(
    model: Path, request: list[list[int]], folder: Path, options: tuple[str, ...] = ()
) -> list[list[int]]:
    with LlamaServer(model, folder / "llama.log", options) as server:
        found = []
        for ids in request:
            body = {
                "prompt": ids,
                "n_predict": NEW,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_tokens": True,
                "cache_prompt": False,
            }
            answer = httpx.post(f"{server.url}/completion", json=body, timeout=120)
            answer.raise_for_status()
            found.append(answer.json()["tokens"])
    return found


def ours(model: Path, body: list[list[int]]) -> list[list[int]]:
    engine, _ = build_engine(EngineConfig(model=str(model), kv_tokens=4096))
    requests = [ask(str(n), ids, max_tokens=NEW, ignore_eos=True) for n, ids in enumerate(body)]
    found = tokens(run(engine, *requests))
    return [found[request.key, 0] for request in requests]


def gap(model: Path, prompt: list[int], a: list[int], b: list[int]) -> dict[str, Any]:
    """The position where two answers differ, and the difference of the logits of the two tokens in
    float32."""
    at = next(n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
    runner = PagedRunner(load_decoder(model))
    logits = runner.step({"x": prompt + a[:at]})["x"][-1]
    between = abs(float(logits[a[at]] - logits[b[at]]))
    best = float(logits.max() - torch.maximum(logits[a[at]], logits[b[at]]))
    return {
        "token": at,
        "gap": round(between, 3),
        "from_best": round(best, 3),
        "ours_is_better": bool(logits[a[at]] > logits[b[at]]),
    }


def measure(model: Path, folder: Path) -> dict[str, Any]:
    request = list(prompts(model))
    mine, other = ours(model, request), theirs(model, request, folder)
    assert all(len(ids) == NEW for ids in mine + other)
    differ = [
        {"prompt": number, **gap(model, request[number], a, b)}
        for number, (a, b) in enumerate(zip(mine, other, strict=True))
        if a != b
    ]
    settings = {"no flash attention": ("-fa", "off"), "ubatch of 1": ("-ub", "1")}
    others = {name: theirs(model, request, folder, words) for name, words in settings.items()}
    return {
        "equal": PROMPTS - len(differ),
        "of": PROMPTS,
        "llama_equal_to_itself": {name: count(other, found) for name, found in others.items()},
        "ours_equal_to_those": {name: count(mine, found) for name, found in others.items()},
        "differ": differ,
    }


def count(some: list[list[int]], others: list[list[int]]) -> int:
    """The number of equal answers."""
    return sum(a == b for a, b in zip(some, others, strict=True))


def main() -> None:
    PEERS.mkdir(parents=True, exist_ok=True)
    install_llama()
    with tempfile.TemporaryDirectory() as folder:
        parts = {m.stem: measure(m, Path(folder)) for m in (shipped_gguf(), gemma_gguf())}
    print(json.dumps(parts))


if __name__ == "__main__":
    main()
