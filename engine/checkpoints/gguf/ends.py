"""Which tokens end a generation, as llama.cpp decides for GGUF files: by their text, since files
name one or two at most (src/llama-vocab.cpp).
"""

from collections.abc import Callable, Iterator, Sequence

from pdserve.engine.checkpoints.gguf.mapping import Metadata

KEYS = ("eos", "eot", "eom")  # of sequence, of turn, of message
TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
)  # fmt: skip
# What only ends a part of an answer where others of these end it.
NO_END = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
# What stands between the files of a prompt for code; their keys, or the texts that Qwen has.
BETWEEN = {"fim_pad": "<|fim_pad|>", "fim_rep": "<|repo_name|>", "fim_sep": "<|file_sep|>"}


def end_ids(metadata: Metadata, id_of: Callable[[str], int | None]) -> Sequence[object]:
    """Ids that end a generation, the file's own first; they are not checked. `id_of` gives the id
    of a text, if it is a token."""
    return list(_ends(metadata, id_of))


def _ends(metadata: Metadata, id_of: Callable[[str], int | None]) -> Iterator[object]:
    for key in KEYS:
        yield metadata.get(f"tokenizer.ggml.{key}_token_id")
    there = {text for text in TEXTS if id_of(text) is not None}
    kept = {text for text, others in NO_END if others <= there}
    for text in TEXTS:
        if text in there - kept:
            yield id_of(text)
    for key, text in BETWEEN.items():
        yield metadata.get(f"tokenizer.ggml.{key}_token_id", id_of(text))
