"""The tokens that end a generation, by the rules of llama.cpp (src/llama-vocab.cpp): by their text,
because GGUF files name at most one or two.
"""

from collections.abc import Callable, Iterator, Sequence

from pdserve.engine.checkpoints.gguf.mapping import Metadata

KEYS = ("eos", "eot", "eom")  # of sequence, of turn, of message
TEXTS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
)  # fmt: skip
# Tokens that end only a part of an answer if the vocabulary also has the other tokens.
PARTIAL_ENDS = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
)
# Separators of files in a code prompt, by metadata key; Qwen's texts if the key is missing.
FILE_SEPARATORS = {"fim_pad": "<|fim_pad|>", "fim_rep": "<|repo_name|>", "fim_sep": "<|file_sep|>"}


def end_ids(metadata: Metadata, id_of: Callable[[str], int | None]) -> Sequence[object]:
    """Return the unchecked ids that end a generation, those named by the file first. `id_of`
    returns the id of a text, or None if it is not a token."""
    return list(_ends(metadata, id_of))


def _ends(metadata: Metadata, id_of: Callable[[str], int | None]) -> Iterator[object]:
    for key in KEYS:
        yield metadata.get(f"tokenizer.ggml.{key}_token_id")
    present = {text for text in TEXTS if id_of(text) is not None}
    not_ends = {text for text, others in PARTIAL_ENDS if others <= present}
    for text in TEXTS:
        if text in present - not_ends:
            yield id_of(text)
    for key, text in FILE_SEPARATORS.items():
        yield metadata.get(f"tokenizer.ggml.{key}_token_id", id_of(text))
