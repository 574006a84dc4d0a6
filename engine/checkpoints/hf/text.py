"""Tokenizer, template and token ids of a Hugging Face model directory."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdserve.engine.checkpoints.hf.json_file import read_bytes, read_json_if_there
from pdserve.engine.checkpoints.source import CheckpointError, TextFiles
from pdserve.engine.checkpoints.text_card import checked_ids, load_tokenizer, puts_before_prompt


def directory_text_files(path: Path, config: dict[str, Any]) -> TextFiles:
    """Raises CheckpointError if there is no tokenizer.json or a file is malformed."""
    if not (path / "tokenizer.json").exists():
        raise CheckpointError(f"{path} has no tokenizer.json")
    encoded = read_bytes(path / "tokenizer.json")
    tokenizer = load_tokenizer(encoded)
    own = read_json_if_there(path / "tokenizer_config.json")
    generation = read_json_if_there(path / "generation_config.json")
    size = tokenizer.get_vocab_size()
    ends = [_token_id(tokenizer, own.get("eos_token"))]
    for source in (generation, config):
        given = source.get("eos_token_id")
        ends += given if isinstance(given, list) else [given]
    starts = (
        _token_id(tokenizer, own.get("bos_token")),
        generation.get("bos_token_id"),
        config.get("bos_token_id"),
    )
    bos = next((start for start in starts if checked_ids([start], size)), None)
    return TextFiles(
        tokenizer_json=encoded,
        chat_template=_template(path, own),
        generation_config=generation,
        eos_ids=checked_ids(ends, size),
        bos_id=bos,
        adds_bos=puts_before_prompt(tokenizer, bos),
    )


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token given as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return found


def _template(path: Path, own: dict[str, Any]) -> str:
    """From the file of its own, the older JSON file, or tokenizer_config.json, in that order."""
    if (path / "chat_template.jinja").exists():
        return read_bytes(path / "chat_template.jinja").decode("utf-8", "replace")
    given = read_json_if_there(path / "chat_template.json").get("chat_template")
    given = given or own.get("chat_template")
    if isinstance(given, list):  # several by name
        entries = (entry for entry in given if isinstance(entry, dict))
        given = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    return given if isinstance(given, str) else ""
