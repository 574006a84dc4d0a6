"""The engine's options (`EngineConfig`), and `option`, which declares a dataclass field as a
command-line option of the engine or of any other process.

Pure; it imports no other module of pdserve, so that engine and services can both use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    min: float | None = None,
    max: float | None = None,
    secret: bool = False,
    flag: str | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    `secret`: mask the value wherever settings are shown. `flag`: use this name for the command-line
    flag instead of the one derived from the field's name. Arguments left at their defaults do not
    appear in the field's metadata.
    """
    metadata: dict[str, Any] = {"help": help}
    properties = {
        "choices": choices,
        "min": min,
        "max": max,
        "flag": flag,
        "secret": secret or None,
    }
    metadata.update({name: value for name, value in properties.items() if value is not None})
    return field(default=default, metadata=metadata)


class ConfigError(ValueError):
    """Raised if an engine option is unknown, contradicts another one or the model, or needs what
    this machine lacks. The message addresses the user."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options for how a worker loads and runs its model."""

    model: str = option(
        "", "GGUF file, model directory or Hugging Face id; empty: the bundled model"
    )
    served_name: str = option("", "model name that clients use; empty: derived from --model")
    task: str = option(
        "auto",
        "task to serve: generate, embed, or score (a reranker that answers yes or no about a "
        "document, or has a head that scores); auto: score with such a head, embed if the model's "
        "files define pooling or it has no output head, else generate",
        choices=("auto", "generate", "embed", "score"),
    )
    pooling: str = option(
        "auto",
        "pooling of embeddings: last (the last token's final hidden state), mean (over all "
        "tokens) or cls (the first token's); auto: as the model's files define, else mean for an "
        "encoder and last for another model",
        choices=("auto", "last", "mean", "cls"),
    )
    pool: str = option(
        "none",
        "pooling of embeddings that a generating model also computes: last or mean, as for "
        "--pooling; none: it refuses requests for embeddings",
        choices=("none", "last", "mean"),
    )
    device: str = option(
        "cpu",
        "device to compute on; auto: a GPU if one is usable, else the CPU",
        choices=("auto", "cpu", "cuda"),
    )
    kernels: str = option(
        "auto",
        "compute backend: auto, native (C++ for cpu), cuda (Triton), reference (torch), or another "
        "backend of engine/backends; auto: native on cpu and cuda on cuda, or reference if another "
        "option rules these out",
    )
    enforce_eager: bool = option(
        False, "launch the cuda kernels one by one instead of replaying recorded CUDA graphs"
    )
    native_isa: str = option(
        "",
        "instruction set of the native kernels (avx512, avx2, generic); empty: the best one that "
        "the CPU supports",
    )
    weights: str = option(
        "auto",
        "format of weights in memory: quantized (as stored), or expanded at load to bf16 or "
        "float32; auto: as stored with native and cuda kernels, else float32 on cpu, bf16 on cuda",
        choices=("auto", "quantized", "bf16", "float32"),
    )
    isq: str = option(
        "",
        "quantize unquantized weights to this format while they load: q4_0, q4_1, q5_0, q5_1, "
        "q8_0, q2k to q6k; empty: do not quantize",
    )
    kv_dtype: str = option(
        "auto",
        "dtype of keys and values; auto: float32 for an encoder, otherwise float16 with native "
        "kernels, else the compute dtype; int8: native kernels only",
        choices=("auto", "float32", "bf16", "float16", "int8"),
    )
    block_size: int = option(32, "tokens per KV block", min=1, max=1024)
    kv_tokens: int = option(0, "KV pool size in tokens; 0: as many as fit in free memory", min=0)
    host_engines: int = option(
        1, "engines that share this machine's free memory, when the KV pool is sized from it", min=1
    )
    max_running: int = option(64, "maximum sequences in a batch", min=1, max=4096)
    chunk_size: int = option(
        0,
        "tokens per prefill chunk; 0: measured at start, about 100 ms of work; an encoder ignores "
        "it: one chunk is a whole text of up to its context length",
        min=0,
    )
    step_tokens: int = option(
        0,
        "maximum tokens that one step computes; 0 (also the minimum): max_running + one prefill "
        "chunk (for an encoder: its context length)",
        min=0,
    )
    context_len: int = option(0, "maximum context length in tokens; 0: the model's maximum", min=0)
    prefix_cache: bool = option(
        True, "keep the KV of prompts in memory and reuse it for prompts that begin equally"
    )
    max_waiting: int = option(
        256, "maximum requests that wait in the queue; further ones are refused", min=1
    )
    threads: int = 0  # compute threads; 0: the backend decides. Set by the launcher, no option
