"""The quality of the native kernels: agreement with float32, and perplexity per stored type.

Teacher-forced over benchmarks/text/prose.txt in windows of 512 positions. Float32 is pdserve's
reference backend on the same file's dequantized weights. Agreement is the share of positions with
float32's best id, of pdserve and of llama.cpp on the same file, for SmolLM2 and Gemma 3;
llama.cpp's scores are read through its C API (contend_llama.cpp). Perplexity is compared with
float32's for every stored type: SmolLM2 requantized by llama-quantize (weights.TYPES; the figures
name the types of each file), and bf16. Prints one JSON object; needs tests/support in PYTHONPATH.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import weights
from contender import Contender, engine_command, llama_command
from peers import PEERS, ROOT, say
from weights import TYPES, bf16_folder, gemma_gguf, shipped_gguf, typed_gguf

Top = Sequence[tuple[int, float]]  # ids and log-probabilities, best first


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A position whose best id is not float32's."""

    position: int
    expected: int
    got: int
    gap: float  # between the two in float32, in log-probability
    at_least: bool  # `got` is not among float32's candidates: the gap is that to the last candidate


def mismatches(reference: Sequence[Top], argmax: Sequence[int]) -> list[Mismatch]:
    """Mismatches in order. Raises ValueError if the numbers of positions differ."""
    if len(reference) != len(argmax):
        raise ValueError(f"{len(reference)} positions of the reference, {len(argmax)} others")
    found = []
    for position, (top, got) in enumerate(zip(reference, argmax, strict=True)):
        best, highest = top[0]
        if got == best:
            continue
        known = dict(top)
        gap = highest - known.get(got, top[-1][1])
        found.append(Mismatch(position, best, got, round(gap, 6), got not in known))
    return found


def perplexity(nll: Sequence[float]) -> float:
    """Perplexity from the mean over all positions; not finite if a score is not."""
    return math.exp(math.fsum(nll) / len(nll)) if all(map(math.isfinite, nll)) else math.nan


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The scores of several windows as one."""
    return {key: [one for part in parts for one in part[key]] for key in parts[0]}


def windows(ids: Sequence[int], length: int, first: Sequence[int] = ()) -> list[list[int]]:
    """Whole windows of `length` ids, each starting with `first` (a bos id, or nothing)."""
    step = length - len(first)
    return [[*first, *ids[at : at + step]] for at in range(0, len(ids) - step + 1, step)]


WINDOW = 513
REFERENCE = ("kernels=reference", "weights=float32", "kv_dtype=float32")


def text_windows(model: Path) -> list[list[int]]:
    """The text as ids of the model; each window starts with bos if the model needs one."""
    from transformers import AutoTokenizer

    folder, options = (model, {}) if model.is_dir() else (model.parent, {"gguf_file": model.name})
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    text = (ROOT / "benchmarks/text/prose.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False)
    begun = tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]
    return windows(ids, WINDOW, [tokenizer.bos_token_id] if begun else [])


def scores(name: str, words: list[str], request: list[list[int]]) -> dict[str, list[Any]]:
    """Scores of all windows by one contender."""
    log = PEERS / "logs" / "quality.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with Contender(name, words, log) as contender:
        parts = [contender.ask(f"score {' '.join(map(str, ids))}") for ids in request]
    found = joined(parts)
    say(f"{name}: perplexity {perplexity(found['nll']):.4f}")
    return found


def stored_types(path: Path) -> dict[str, int]:
    """The number of matrices per stored type in the file."""
    from gguf import GGUFReader

    return dict(Counter(t.tensor_type.name for t in GGUFReader(path).tensors if len(t.shape) > 1))


def agreement(name: str, path: Path) -> dict[str, Any]:
    """Native and llama.cpp against float32 on one file."""
    request = text_windows(path)
    exact = scores(f"{name} float32", engine_command(path, *REFERENCE), request)
    ours = scores(f"{name} native", engine_command(path, "kernels=native"), request)
    theirs = scores(f"{name} llama.cpp", llama_command(path), request)
    positions = len(exact["top"])
    wrong = {who: mismatches(exact["top"], found["argmax"]) for who, found in
             (("native", ours), ("llama.cpp", theirs))}  # fmt: skip
    shares = {who: 1 - len(found) / positions for who, found in wrong.items()}
    off = perplexity(ours["nll"]) / perplexity(exact["nll"]) - 1
    return {
        "positions": positions,
        "agreement": {who: round(share, 4) for who, share in shares.items()},
        "perplexity": {"float32": perplexity(exact["nll"]), "native": perplexity(ours["nll"]),
                       "llama.cpp": perplexity(theirs["nll"])},
        "perplexity_off": round(off, 5),
        "mismatches": [asdict(m) for m in wrong["native"]],
    }  # fmt: skip


def path_quality(path: Path) -> dict[str, Any]:
    """Perplexity of one file on the native backend, and in float32 with its dequantized weights."""
    request = text_windows(path)
    exact = scores(f"{path.name} float32", engine_command(path, *REFERENCE), request)
    native = scores(f"{path.name} native", engine_command(path, "kernels=native"), request)
    figures = {"float32": perplexity(exact["nll"]), "native": perplexity(native["nll"])}
    types = stored_types(path) if path.is_file() else {"BF16": -1}
    off = round(figures["native"] / figures["float32"] - 1, 5)
    return figures | {"off": off, "types": types}


def main() -> None:
    weights.prepare()
    models = {"SmolLM2 Q4_1": shipped_gguf(), "Gemma 3 Q4_K_M": gemma_gguf()}
    agreed = {name: agreement(name, path) for name, path in models.items()}
    files = {kind: typed_gguf(kind) for kind in TYPES} | {"BF16 safetensors": bf16_folder()}
    paths = {kind: path_quality(path) for kind, path in files.items()}
    print(json.dumps({"agreement": agreed, "perplexity": paths}))


if __name__ == "__main__":
    main()
