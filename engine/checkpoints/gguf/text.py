"""Tokenizer, template and token ids of a GGUF file."""

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


def gguf_text_files(metadata: Metadata) -> TextFiles:
    """What the metadata says about text. Raises CheckpointError if its tokenizer is not known."""
    encoded = tokenizer_json(metadata)
    tokenizer = load_tokenizer(encoded)
    template = metadata.get("tokenizer.chat_template", "")
    if not isinstance(template, str):
        template = ""
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
