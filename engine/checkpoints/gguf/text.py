"""Tokenizer, template and token ids of a GGUF file."""

from pdserve.engine.checkpoints.chat_template import one_template, with_token_names
from pdserve.engine.checkpoints.gguf.ends import end_ids
from pdserve.engine.checkpoints.gguf.mapping import Metadata
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json
from pdserve.engine.checkpoints.source import TextFiles
from pdserve.engine.checkpoints.text_card import (
    checked_ids,
    load_tokenizer,
    puts_before_prompt,
    turn_end_ids,
)

_TEMPLATE = "tokenizer.chat_template"
_TOKENS = {
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",  # GGUF's spelling
    "cls": "tokenizer.ggml.cls_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
}


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
