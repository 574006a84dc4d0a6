"""docs/models.md, made from what the code knows: a program that prints the page. `make docs` writes
it, tests/test_docs.py compares it."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping

from pdserve.engine.architectures import known_specs
from pdserve.engine.checkpoints.quantization import QuantizationMethod, methods
from pdserve.engine.models.hf_config.standard import ACTIVATIONS
from pdserve.engine.models.rope import ROPE_KINDS
from pdserve.engine.models.spec import ModelSpec
from pdserve.engine.weights.format import BLOCKS, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats
from pdserve.engine.weights.mix import TYPES
from pdserve.engine.weights.plain import PLAIN
from pdserve.kernels.cpu import FORMATS, CpuKernels

MAPPINGS_TEST = "tests/engine/checkpoints/test_gguf_checkpoint.py"
ROWS, COLS = 64, 1024
HEAD = """\
# Models and weight formats

`make docs` writes this page from the code. A model is a Hugging Face directory (safetensors) or a
GGUF file.
"""
TESTS = f"""
Each has a tiny seeded model of awkward sizes (tests/support/builders/tiny_models.py). Its logits
equal transformers' within 1e-4 on the reference and on the native kernels
(tests/engine/models/test_architectures.py), its GGUF file is read as the same model
({MAPPINGS_TEST}), and its results are bitwise the same in
chunks, in company and on more threads (tests/engine/models/test_native_invariance.py).

Models that go by another name load as what their files are: Yi and DeepSeek-R1-Distill-Llama as
Llama, QwQ and R1-Distill-Qwen as Qwen 2 (tests/engine/models/test_released_configs.py).
"""
METHODS_TAIL = """
On the native kernels weights are computed with as they are stored. What is expanded to float32 is
counted in the log: matrices of experts whose columns are stored in another order (desc_act of
GPTQ), and the key half of `kv_b_proj` of latent attention, which is transposed; `--isq` quantizes
that half anew.
"""
FORMATS_HEAD = """
## GGUF types

Bits of a weight, in the file and in memory on the native kernels. IQ1 to IQ3 and TQ become levels
of 8 bits with a scale for each of their groups, at load and without loss.
"""
QUANTIZING = """
## Quantizing

`--isq TYPE` quantizes plain weights (float32, bfloat16, float16) while a model loads;
`pdserve quantize MODEL.gguf OUT.gguf --type TYPE` writes a file that llama.cpp reads too. Both give
a matrix the same format (tests/engine/test_isq.py). What is quantized already stays as it is, and
so do vectors, routers of experts and, in a file, matrices whose names are not known.

A type is a mix, as llama.cpp's of its name is, q3k to q5k as Q3_K_M to Q5_K_M: the head is Q6_K
(Q8_0 of q8_0), and q2k to q5k give some of the value, down and output matrices more bits. With 8
experts the key and value matrices are Q8_0 in every type, and attention's output is Q5_K in q2k to
q4k. A matrix of q, k and v in one counts as a value matrix. tests/engine/weights/test_mix.py
compares all this with what llama-quantize says. Two things differ: rows that are no multiple of a
type's block become Q8_0, or stay; and `--isq` counts no layers behind a model's own (MTP), which
the GGUF of GLM 4.5 has, where it asks for the first and the last eighth of the layers.

The types are {known}; q4, q5 and q8 stand for
q4_0, q5_0 and q8_0, and q4_k or q4_k_m for q4k.
"""
REFUSED = """
## What is refused

Everything else, with a message that names the model's path and the cause, and exit code 1:
architectures and quantization methods that are not in these tables (bitsandbytes, MLX), rope
scalings other than {ropes},
activations other than {activations}, tensors
that the config has no use for or lacks, and GGUF keys that could change results and that nobody
reads.
"""


def _lines() -> Iterator[str]:
    yield HEAD
    yield "## Architectures\n"
    yield from _table(("class in config.json", "GGUF", "what it is", "module"), _architectures())
    yield TESTS.rstrip()
    yield "\n## Quantized safetensors\n"
    yield from _table(("`quant_method`", "what it is", "module"), _methods())
    yield METHODS_TAIL.rstrip()
    yield FORMATS_HEAD
    yield from _table(("type", "in the file", "in memory"), _formats())
    yield QUANTIZING.format(known=", ".join(TYPES)).rstrip()
    ropes = ", ".join(kind for kind in ROPE_KINDS if kind != "factors")
    yield REFUSED.format(ropes=ropes, activations=", ".join(ACTIVATIONS)).rstrip()


def _architectures() -> Iterator[tuple[str, ...]]:
    for spec in known_specs():
        module = _module_of(spec)
        gguf = f"`{spec.gguf.arch}`" if spec.gguf else ""
        if "MixtralForCausalLM" in spec.architectures:
            gguf = "`llama`"
        names = ", ".join(f"`{name}`" for name in spec.architectures)
        yield names, gguf, _said(sys.modules[module]), f"{module.rpartition('.')[2]}.py"


def _module_of(spec: ModelSpec) -> str:
    modules = (name for name in sys.modules if name.startswith("pdserve.engine.architectures."))
    return next(name for name in modules if getattr(sys.modules[name], "SPEC", None) is spec)


def _methods() -> Iterator[tuple[str, ...]]:
    by_class: dict[type[QuantizationMethod], list[str]] = {}
    for name, method in methods().items():
        by_class.setdefault(method, []).append(name)
    for method, names in sorted(by_class.items(), key=lambda item: item[1]):
        module = inspect.getmodule(method)
        assert module is not None
        quoted = ", ".join(f"`{name}`" for name in names)
        yield quoted, _said(module), f"{module.__name__.rpartition('.')[2]}.py"


def _said(module: object) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((inspect.getdoc(module) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z\)])\. ", text)[0].rstrip(".")


def _formats() -> Iterator[tuple[str, ...]]:
    stored: dict[str, float] = {name: 8.0 * PLAIN[name].itemsize for name in ("F32", "F16", "BF16")}
    for name, form in formats().items():
        if isinstance(form, BlockFormat):
            stored[name] = 8 * form.block_bytes / form.block_values
    packed = _packed_bits(stored)
    for name, bits in sorted(stored.items(), key=lambda item: (item[1], item[0])):
        yield name, f"{bits:.4g}", f"{packed.get(name, 32.0):.4g}"


def _packed_bits(stored: Mapping[str, float]) -> dict[str, float]:
    import numpy as np

    kernels = CpuKernels(1, "generic")
    found = {}
    for name, bits in stored.items():
        blocks = np.zeros((ROWS, int(COLS * bits) // 8), np.uint8)
        if name in FORMATS:
            packed = kernels.pack(blocks, name, ROWS, COLS)
        else:
            raw = formats()[name].packable(RawTensor({BLOCKS: blocks}, name, (ROWS, COLS)))
            if raw.format == name:
                continue
            packed = kernels.pack_groups(raw.format, **raw.parts)
        found[name] = 8 * packed.nbytes / (ROWS * COLS)
    return found


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print("\n".join(_lines()))
