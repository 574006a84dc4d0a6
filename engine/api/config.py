"""Options of an engine; flags and environment variables derive from the field metadata."""

from dataclasses import dataclass, field
from typing import Any


def option(default: Any, help: str, **extra: Any) -> Any:
    """Define a dataclass field that is also a command-line option; `extra`: choices, min, max."""
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options for how a worker loads and runs its model."""

    model: str = option("", "GGUF file, model directory or Hugging Face id; empty: the shipped one")
    served_name: str = option("", "name that clients use; empty: derived from the model")
    task: str = option(
        "auto",
        "what it serves: generate, embed, or score (a reranker that says yes or no to a document); "
        "auto: embed if the model's files say how to pool, or it has no head, else generate",
        choices=("auto", "generate", "embed", "score"),
    )
    pooling: str = option(
        "auto",
        "what an embedding is: the last token's final hidden state, or the mean over all tokens "
        "(auto: as the model's files say, else last)",
        choices=("auto", "last", "mean"),
    )
    device: str = option(
        "cpu",
        "where to run (auto: on a GPU if there is one)",
        choices=("auto", "cpu", "cuda"),
    )
    kernels: str = option(
        "auto",
        "what computes: auto, native (C++ for cpu), cuda (Triton), reference (torch), or another "
        "backend of engine/backends (auto: native on cpu and cuda on cuda where they can)",
    )
    enforce_eager: bool = option(
        False, "launch each of the cuda kernels instead of replaying recorded CUDA graphs"
    )
    native_isa: str = option(
        "",
        "instruction set of the native kernels (avx512, avx2, generic); empty: the best",
    )
    weights: str = option(
        "auto",
        "weights in memory: as stored, or expanded at load (auto: as stored with native and cuda "
        "kernels, else float32 on cpu, bf16 on cuda)",
        choices=("auto", "quantized", "bf16", "float32"),
    )
    isq: str = option(
        "",
        "quantize plain weights while they load: q4_0, q4_1, q5_0, q5_1, q8_0, q2k to q6k",
    )
    kv_dtype: str = option(
        "auto",
        "dtype of keys and values (auto: float16 with native kernels, else what is computed in; "
        "int8: native kernels only)",
        choices=("auto", "float32", "bf16", "float16", "int8"),
    )
    block_size: int = option(32, "tokens per KV block", min=1, max=1024)
    kv_tokens: int = option(0, "KV pool size in tokens; 0: from free memory", min=0)
    host_engines: int = option(
        1, "engines that share this machine's free memory, when the pool is sized by it", min=1
    )
    max_running: int = option(64, "sequences in a batch", min=1, max=4096)
    chunk_size: int = option(
        0, "tokens of a prefill chunk, counted from token 0; 0: about 100 ms of work", min=0
    )
    step_tokens: int = option(
        0, "token budget of one step; 0 (and the least): max_running + one chunk", min=0
    )
    context_len: int = option(0, "cap on the model's context; 0: the model's own", min=0)
    prefix_cache: bool = option(True, "keep and reuse KV of common prefixes")
    max_waiting: int = option(256, "requests queued before new ones are refused", min=1)
    threads: int = 0  # compute threads; 0: the backend decides. Set by the launcher, no option
