"""The cost and quality of in-situ quantization, for every type.

The peak memory of a process that loads a model with --isq, relative to the stored file; and the
perplexity by llama.cpp of the file that `pdserve quantize` writes, relative to that of
llama-quantize's file of that type, and to its file whose matrices have the same formats as
pdserve's. Needs benchmarks/cpu and tests/support in PYTHONPATH.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
from peers import LLAMA_BIN, install_llama
from weights import gemma_gguf, shipped_gguf

from pdserve.engine.checkpoints.gguf import quantize_gguf
from pdserve.engine.checkpoints.gguf.writer import MIXES
from pdserve.engine.weights import TYPES

LEAST_BYTES = 500_000_000
CHUNKS, CONTEXT = 24, 512  # of the language reference included in Python
LLAMA = {  # about 600 MB in bfloat16; every type divides its rows
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LOAD = """
import sys
from pdserve.engine.api.config import EngineConfig
from pdserve.engine.load import load_model
loaded = load_model(EngineConfig(model=sys.argv[1], isq=sys.argv[2]), lambda *_: None)
status = open("/proc/self/status").read()
print(loaded.card.quantization, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def run(*words: str | Path) -> str:
    """The output of a command, including its errors."""
    done = subprocess.run(
        [str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed: {done.stdout[-2000:]}")
    return done.stdout


def peaks(folder: Path) -> dict[str, Any]:
    """By type: the peak bytes of a process that loads a model of bfloat16 safetensors."""
    import torch
    from builders.tiny_models import write_tiny

    model = write_tiny(folder / "wide", "llama", dtype=torch.bfloat16, **LLAMA)
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert stored >= LEAST_BYTES
    found: dict[str, Any] = {"stored_mb": stored // 1_000_000}
    for type, main in TYPES.items():
        label, peak = run(sys.executable, "-c", LOAD, model, type).splitlines()[-1].split()
        assert label == main, label
        found[type] = round(int(peak) / stored, 3)
    return found


def perplexity(model: Path, text: Path) -> float:
    said = run(
        LLAMA_BIN / "llama-perplexity", "-m", model, "-f", text, "-t", "2",
        "-c", str(CONTEXT), "--chunks", str(CHUNKS),
    )  # fmt: skip
    found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
    assert found, said[-2000:]
    return float(found[1])


def same_formats(ours: Path) -> list[str]:
    """Options of llama-quantize that give every matrix the format that it has in `ours`."""
    words = []
    for tensor in gguf.GGUFReader(ours).tensors:
        if len(tensor.shape) > 1:
            format = tensor.tensor_type.name.lower()
            if tensor.name == "token_embd.weight":
                words += ["--token-embedding-type", format]
            words += ["--tensor-type", f"^{re.escape(tensor.name)}$={format}"]
    return words


def perplexities(plain: Path, folder: Path, text: Path) -> dict[str, Any]:
    """Perplexities of an unquantized model and its quantized files, by type."""
    found: dict[str, Any] = {"plain": perplexity(plain, text)}
    for type, main in TYPES.items():
        llama_type = MIXES.get(main, main)
        ours, theirs, same = (folder / f"{name}.gguf" for name in ("ours", "theirs", "same"))
        quantize_gguf(plain, ours, type, lambda fraction: None)
        run(LLAMA_BIN / "llama-quantize", plain, theirs, llama_type)
        run(LLAMA_BIN / "llama-quantize", *same_formats(ours), plain, same, llama_type)
        figures = [perplexity(file, text) for file in (ours, theirs, same)]
        sizes = [round(file.stat().st_size / 1e6) for file in (ours, theirs)]
        found[type] = {
            "ours": figures[0],
            "llama": figures[1],
            "same_formats": figures[2],
            "ratio": round(figures[0] / figures[1], 4),
            "ratio_same_formats": round(figures[0] / figures[2], 4),
            "mb": sizes[0],
            "llama_mb": sizes[1],
        }
        for file in (ours, theirs, same):
            file.unlink()
        print(plain.stem, type, found[type], file=sys.stderr)
    return found


def main() -> None:
    install_llama()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = peaks(folder)
        text = folder / "text"
        text.write_text("\n".join(topics[key] for key in sorted(topics)))
        quality = {}
        for stored in (shipped_gguf(), gemma_gguf()):
            plain = folder / f"{stored.stem}.f32.gguf"
            run(LLAMA_BIN / "llama-quantize", "--allow-requantize", stored, plain, "F32")
            quality[stored.stem] = perplexities(plain, folder, text)
            plain.unlink()
    ratios = [
        one[key]
        for found in quality.values()
        for one in found.values()
        if isinstance(one, dict)
        for key in ("ratio", "ratio_same_formats")
    ]
    peak = max(memory[type] for type in TYPES)
    print(
        json.dumps(
            {
                "peak": peak,
                "worst_ratio": max(ratios),
                "memory": memory,
                "perplexity": quality,
            }
        )
    )


if __name__ == "__main__":
    main()
