"""Compare the engine with vLLM on one GPU: models with random weights, the same requests, no
server, no prefix reuse.

    export PYTHONPATH=.src:benchmarks/gpu:tests/support
    python benchmarks/gpu/peers.py pdserve          # each in an environment that has the package
    python benchmarks/gpu/peers.py vllm
    python benchmarks/gpu/peers.py pdserve --fake   # on a CPU, interpreted, tiny sizes

Prints one JSON object per load. Seconds run from the submission of all requests to their last
token. Loads named "decode" run twice, with one new token and with more, and their figure is of the
difference.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

REPEAT = 2
TEMPERATURE = 0.6


@dataclass(frozen=True)
class Prompt:
    """Random token ids and the number of tokens to generate after them."""

    ids: tuple[int, ...]
    new_tokens: int


@dataclass(frozen=True)
class Load:
    """Requests that are submitted at once, other ones for each run."""

    name: str
    prompts: Callable[[int], list[Prompt]]  # by the number of the run

    def seconds(self, contender: "Contender", number: int) -> float:
        """Return the seconds of a run, for a decode load without those of its first tokens."""
        prompts = self.prompts(number)
        seconds = contender.run(prompts)
        if self.name.startswith("decode"):
            seconds -= contender.run([Prompt(one.ids, 1) for one in self.prompts(number + 50)])
        return seconds

    def num_tokens(self, number: int) -> int:
        """Return the tokens that a run's speed counts: of prompts if the load is a prefill."""
        prompts = self.prompts(number)
        if self.name.startswith("prefill"):
            return sum(len(one.ids) for one in prompts)
        first = len(prompts) if self.name.startswith("decode") else 0
        return sum(one.new_tokens for one in prompts) - first


class Contender(Protocol):
    """An engine with one model."""

    def run(self, prompts: list[Prompt]) -> float:
        """Generate all tokens; return the seconds that it takes."""

    def close(self) -> None:
        """Free the model."""


def even(count: int, prompt: int, new: int, vocab: int, seed: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    ids = [tuple(map(int, rng.integers(0, vocab, prompt))) for _ in range(count)]
    return [Prompt(one, new) for one in ids]


def mixed(count: int, shortest: int, longest: int, vocab: int, seed: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(count):
        ids = rng.integers(0, vocab, rng.integers(shortest, longest + 1))
        prompts.append(Prompt(tuple(map(int, ids)), int(rng.integers(shortest, longest + 1))))
    return prompts


def loads(fake: bool) -> dict[str, list[Load]]:
    """The loads of each model."""
    if fake:
        return {
            "qwen": [Load("short prompts", lambda n: even(4, 16, 6, 260, n))],
            "llama": [
                Load("decode, 1 row", lambda n: even(1, 20, 5, 260, n)),
                Load("prefill of 40", lambda n: even(1, 40, 1, 260, n)),
            ],
        }
    qwen, llama = 151936, 128256
    return {
        "qwen": [
            Load("short prompts", lambda n: even(256, 16, 1024, qwen, 100 + n)),
            Load("mixed prompts", lambda n: mixed(256, 100, 1024, qwen, 1 + n)),
        ],
        "llama": [
            Load("decode, 1 row", lambda n: even(1, 1000, 129, llama, 10 + n)),
            Load("decode, 64 rows", lambda n: even(64, 1000, 129, llama, 20 + n)),
            Load("prefill of 8,192", lambda n: even(1, 8192, 1, llama, 30 + n)),
            Load("prefill of 64 x 1,000", lambda n: even(64, 1000, 1, llama, 40 + n)),
        ],
    }


class Pdserve:
    """The engine on its thread, as a worker runs it."""

    def __init__(self, model: str, fake: bool, largest: list[Prompt]) -> None:
        import torch
        from random_models import (
            FAKE_LLAMA,
            FAKE_QWEN3,
            LLAMA_8B,
            QWEN3_0_6B,
            make_recorder,
            random_decoder,
        )
        from served_engine import ServedEngine

        from pdserve.kernels.cuda.sampling import CudaSampling

        device = "cpu" if fake else "cuda"
        if fake:
            from fakes import triton_interpreter as _  # noqa: F401
        else:
            torch.cuda.set_stream(torch.cuda.Stream())
        stream = None if fake else torch.cuda.current_stream()
        real, tiny = {"qwen": (QWEN3_0_6B, FAKE_QWEN3), "llama": (LLAMA_8B, FAKE_LLAMA)}[model]
        decoder = random_decoder(tiny if fake else real, device, stream=stream)
        self._served = ServedEngine(
            decoder,
            device,
            [len(one.ids) + one.new_tokens for one in largest],
            recorder=make_recorder(device),
            sampling=CudaSampling(stream),
            chunk_size=64 if fake else 8192 if model == "llama" else 2048,
            step_tokens=0 if fake or model == "llama" else 8192,
        )
        self._names = iter(range(1 << 30))

    def run(self, prompts: list[Prompt]) -> float:
        from pdserve.engine.api import Request, SamplingParams

        requests = [
            Request(
                str(next(self._names)),
                one.ids,
                SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=one.new_tokens),
                seed=number,
            )
            for number, one in enumerate(prompts)
        ]
        return self._served.run(requests)

    def close(self) -> None:
        self._served.close()


class Vllm:
    """vLLM with its defaults, but random weights and no prefix cache."""

    def __init__(self, model: str, largest: list[Prompt]) -> None:
        from random_models import LLAMA_8B, QWEN3_0_6B
        from vllm import LLM

        config = {"qwen": QWEN3_0_6B, "llama": LLAMA_8B}[model]
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
        self._llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_num_seqs=len(largest),
            max_model_len=config["max_position_embeddings"],
        )

    def run(self, prompts: list[Prompt]) -> float:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=TEMPERATURE,
                ignore_eos=True,
                max_tokens=one.new_tokens,
                detokenize=False,
            )
            for one in prompts
        ]
        ids = [{"prompt_token_ids": list(one.ids)} for one in prompts]
        started = time.perf_counter()
        self._llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - started

    def close(self) -> None:
        del self._llm


def measure(contender: Contender, load: Load) -> dict[str, Any]:
    """Run a load once to warm up, then twice."""
    load.seconds(contender, REPEAT)
    runs = []
    for number in range(REPEAT):
        seconds = load.seconds(contender, number)
        speed = load.num_tokens(number) / seconds
        runs.append({"seconds": round(seconds, 4), "tokens_s": round(speed, 1)})
    return {"load": load.name, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("pdserve", "vllm"))
    parser.add_argument("--model", choices=("qwen", "llama"), help="default: both, one by one")
    parser.add_argument("--fake", action="store_true", help="tiny, on a CPU; only with pdserve")
    args = parser.parse_args()
    if args.fake and args.engine != "pdserve":
        parser.error("--fake: only pdserve's kernels run on a CPU")
    if args.fake:
        os.environ["TRITON_INTERPRET"] = "1"
    if args.model is None:  # a process each, which frees the memory of the model before
        for model in ("qwen", "llama"):
            subprocess.run([sys.executable, *sys.argv, "--model", model], check=True)
        return
    chosen = loads(args.fake)[args.model]
    largest = max((load.prompts(0) for load in chosen), key=_num_tokens)
    contender: Contender
    if args.engine == "pdserve":
        contender = Pdserve(args.model, args.fake, largest)
    else:
        contender = Vllm(args.model, largest)
    for load in chosen:
        line = {"engine": args.engine, "model": args.model, **measure(contender, load)}
        print(json.dumps(line), flush=True)
    contender.close()


def _num_tokens(prompts: list[Prompt]) -> int:
    return sum(len(one.ids) + one.new_tokens for one in prompts)


if __name__ == "__main__":
    main()
