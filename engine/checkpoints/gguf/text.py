"""Tokenizer, template and token ids of a GGUF file."""

from collections.abc import Callable, Iterator, Sequence

from pdserve.engine.checkpoints.gguf.mapping import Metadata
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.engine.checkpoints.source import TextFiles
from pdserve.engine.checkpoints.text import (
    checked_ids,
    load_tokenizer,
    one_template,
    puts_before_prompt,
    turn_end_ids,
    with_token_names,
)

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
_TEMPLATE = "tokenizer.chat_template"
_TOKENS = {
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",  # GGUF's spelling
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}


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


def gguf_text_files(metadata: Metadata) -> TextFiles:
    """Build the text files from the metadata. Raises CheckpointError for an unknown tokenizer."""
    encoded = tokenizer_json(metadata)
    tokenizer = load_tokenizer(encoded)
    templates = {"default": metadata.get(_TEMPLATE)} | {
        name.removeprefix(f"{_TEMPLATE}."): text
        for name, text in metadata.items()
        if name.startswith(f"{_TEMPLATE}.")
    }
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    tokens = {
        f"{name}_token": tokenizer.id_to_token(metadata[key])
        for name, key in _TOKENS.items()
        if checked_ids([metadata.get(key)], tokenizer.get_vocab_size())
    }
    template = with_token_names(one_template(texts), tokens)
    ends = [*end_ids(metadata, tokenizer.token_to_id), *sorted(turn_end_ids(tokenizer, template))]
    size = tokenizer.get_vocab_size()
    bos = checked_ids([metadata.get("tokenizer.ggml.bos_token_id")], size)
    bos_id = bos[0] if bos else None
    return TextFiles(
        tokenizer_json=encoded,
        chat_template=template,
        eos_ids=checked_ids(ends, size),
        bos_id=bos_id,
        adds_bos=puts_before_prompt(tokenizer, bos_id),
    )
