"""Print docs/models.md, generated from the code.

`make docs` writes the page, tests/test_docs.py compares it.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType

from pdserve.engine import architectures
from pdserve.engine.architectures import known_specs
from pdserve.engine.checkpoints.quantization import QuantizationMethod, methods
from pdserve.engine.models import ModelSpec
from pdserve.engine.models.hf_config import ACTIVATIONS
from pdserve.engine.models.rope import ROPE_KINDS
from pdserve.engine.weights import BLOCKS, PLAIN, TYPES, BlockFormat, RawTensor
from pdserve.engine.weights.formats import formats
from pdserve.kernels.cpu import FORMATS, CpuKernels

MAPPINGS_TEST = "tests/engine/checkpoints/test_gguf_checkpoint.py"
ROWS, COLS = 64, 1024
# Architectures whose GGUF files have the name of another one.
SHARED_GGUF = {
    "BertForSequenceClassification": "bert",
    "InternLM3ForCausalLM": "llama",
    "MinistralForCausalLM": "llama",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "ModernBertForSequenceClassification": "modern-bert",
    "Olmo3ForCausalLM": "olmo2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "XLMRobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
}
HEAD = """\
# Models and weight formats

`make docs` writes this page from the code. A model is a Hugging Face directory (safetensors) or a
GGUF file.
"""
TESTS = f"""
Each architecture of a decoder is tested with a tiny seeded model of unusual sizes
(tests/support/builders/tiny_models.py). Its logits differ from those of transformers by at most
1e-4, on the reference kernels and on the native kernels
(tests/engine/models/test_architectures.py). Its GGUF file loads as the same model
({MAPPINGS_TEST}). Its results are bitwise equal in chunks,
in larger batches and with more threads (tests/engine/models/test_native_invariance.py).

BERT, RoBERTa and ModernBERT are encoders, which make embeddings and generate no text. Their
attention sees a whole text, so that one step computes all of it and no keys and values are kept.
Their vectors differ from those of transformers by at most 1e-4, on the reference kernels and on the
native kernels. On the native kernels they are bitwise equal alone and in a batch
(tests/engine/test_encoders.py). They run on a CPU.

A GGUF file of an encoder gives the vectors, scores and token ids of its safetensors
(tests/engine/checkpoints/test_gguf_encoders.py), as far as the format can state them:

- A file of RoBERTa or XLM-RoBERTa loads as BERT. It lacks the position of padding, so a text that
  contains `<pad>` gets another vector.
- Most files of BERT do not say whether text is lowercased and accents are removed: capital letters
  and accents in the vocabulary tell.
- Vectors are normalized unless the file says otherwise (`normalize_embeddings`, which Ollama's
  converter writes), also those of a model that does not normalize them.
- A file without `pooling_type` gets the mean, with a warning.
- `<mask>` in the text is no special token in files that were made from `sentencepiece.bpe.model`.
- No file has the activation of a score: it is the sigmoid.
- llama.cpp's converter leaves the dense layer out of the head of a BERT cross-encoder
  (ms-marco-MiniLM). Such a file is refused. The files of XLM-RoBERTa (bge-reranker-v2-m3) and
  ModernBERT have that layer.
- A file of a BERT whose tokenizer is not WordPiece is refused: it lacks the scores of the pieces.
- A file of DistilBERT loads as BERT without token types, but is refused if it has a head.

A model with a classification head of one label (`ForSequenceClassification`), encoder or decoder,
scores pairs of texts for `/rerank` and `/score`. The tokenizer frames a pair. If it puts nothing
between two texts, as those of Qwen2 and Qwen3, the prompt is that of Qwen3-Reranker, with the
request's `instruction`; a model whose tokenizer lacks that prompt's tokens (`<|im_start|>`,
`<|im_end|>`, `<think>`, `</think>`), such as Qwen2's, does not load. Chat templates are not used
for pairs: a model trained with another prompt gets meaningless scores. The score is the sigmoid of
the head's result, unless config.json has an activation of sentence-transformers.

With `truncate_prompt_tokens`, a framed pair is cut as by transformers' strategy `longest_first`; in
the prompt of Qwen3-Reranker only the document is cut, and a limit or a query that leaves it no room
is a 400.

Models with another name load as the architecture of their files: Yi, Falcon 3 and
DeepSeek-R1-Distill-Llama as Llama, QwQ and R1-Distill-Qwen as Qwen 2
(tests/engine/models/test_released_configs.py).
"""
METHODS_TAIL = """
The native kernels compute with the weights as they are stored. Two kinds of matrices are expanded
to float32, and the log counts them: expert matrices whose columns are stored in another order
(desc_act of GPTQ), and the key half of `kv_b_proj` of latent attention, which is transposed.
`--isq` quantizes that half again.
"""
FORMATS_HEAD = """
## GGUF types

The table shows the bits per weight in the file, and in memory on the native kernels. IQ1 to IQ3
and TQ are converted at load, without loss, to levels of 8 bits with one scale per group.
"""
QUANTIZING = """
## Quantizing

`--isq TYPE` quantizes plain weights (float32, bfloat16, float16) while a model loads;
`pdserve quantize MODEL.gguf OUT.gguf --type TYPE` writes a file that llama.cpp can read. Both give
a matrix the same format (tests/engine/test_isq.py). They do not change tensors that are already
quantized, vectors, expert routers and, in a file, matrices with unknown names.

A type is a mix of formats, like the llama.cpp type of the same name; q3k to q5k correspond to
Q3_K_M to Q5_K_M. The head is Q6_K (Q8_0 in q8_0), and q2k to q5k give more bits to some of the
value, down and output matrices. With 8 experts, the key and value matrices are Q8_0 in every type,
and the output matrix of attention is Q5_K in q2k to q4k. A fused q, k and v matrix counts as a
value matrix. tests/engine/weights/test_mix.py compares these rules with llama-quantize. There are
two differences: rows whose length is not a multiple of a type's block become Q8_0 or are not
quantized; and where a rule applies to the first and last eighth of the layers, `--isq` does not
count the additional MTP layers, which the GGUF file of GLM 4.5 contains.

The types are {known}; q4, q5 and q8 are aliases of
q4_0, q5_0 and q8_0, and q4_k and q4_k_m are aliases of q4k.
"""
REFUSED = """
## Unsupported models

A worker refuses any other model with exit code 1 and a message that names the model's path and the
cause: architectures and quantization methods that are not in these tables (bitsandbytes, MLX), rope
scalings other than {ropes},
activations other than {activations}, missing or
unexpected tensors, and unknown GGUF keys that could change results.
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
        arch = spec.gguf.arch if spec.gguf else SHARED_GGUF.get(spec.architectures[0])
        gguf = f"`{arch}`" if arch else ""
        names = ", ".join(f"`{name}`" for name in spec.architectures)
        summary = _summary(spec.parse if spec.parse.__doc__ else module)
        summary = summary.removeprefix("Parse the config of ")
        if "ForConditionalGeneration" in names:
            summary = "with a vision tower, of which only the text part is served"
        yield names, gguf, summary, f"{module.__name__.rpartition('.')[2]}.py"


def _module_of(spec: ModelSpec) -> ModuleType:
    """Return the module of engine/architectures that has the spec."""
    modules = (
        sys.modules[name] for name in sys.modules if name.startswith(f"{architectures.__name__}.")
    )
    return next(one for one in modules if any(value is spec for value in vars(one).values()))


def _methods() -> Iterator[tuple[str, ...]]:
    by_class: dict[type[QuantizationMethod], list[str]] = {}
    for name, method in methods().items():
        by_class.setdefault(method, []).append(name)
    for method, names in sorted(by_class.items(), key=lambda item: item[1]):
        module = inspect.getmodule(method)
        assert module is not None
        quoted = ", ".join(f"`{name}`" for name in names)
        yield quoted, _summary(module), f"{module.__name__.rpartition('.')[2]}.py"


def _summary(described: object) -> str:
    """Return the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(described) or "").partition("\n\n")[0].split())
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
    packed_bits = {}
    for name, bits in stored.items():
        blocks = np.zeros((ROWS, int(COLS * bits) // 8), np.uint8)
        if name in FORMATS:
            packed = kernels.pack(blocks, name, ROWS, COLS)
        else:
            raw = formats()[name].packable(RawTensor({BLOCKS: blocks}, name, (ROWS, COLS)))
            if raw.format == name:
                continue
            packed = kernels.pack_groups(raw.format, **raw.parts)
        packed_bits[name] = 8 * packed.nbytes / (ROWS * COLS)
    return packed_bits


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print("\n".join(_lines()))
