"""Tokenizer, template and token ids of a Hugging Face model directory."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pdserve.engine.checkpoints.hf.json_file import read_bytes, read_json_if_exists
from pdserve.engine.checkpoints.source import CheckpointError, TextFiles
from pdserve.engine.checkpoints.text import (
    checked_ids,
    load_tokenizer,
    one_template,
    puts_before_prompt,
    with_token_names,
)


def directory_text_files(path: Path, config: dict[str, Any]) -> TextFiles:
    """Read the files. Raises CheckpointError without tokenizer.json and for a malformed file."""
    if not (path / "tokenizer.json").exists():
        raise CheckpointError(f"{path} has no tokenizer.json")
    encoded = read_bytes(path / "tokenizer.json")
    tokenizer = load_tokenizer(encoded)
    tokenizer_config = read_json_if_exists(path / "tokenizer_config.json")
    generation = read_json_if_exists(path / "generation_config.json")
    size = tokenizer.get_vocab_size()
    ends = [_token_id(tokenizer, tokenizer_config.get("eos_token"))]
    for source in (generation, config):
        ids = source.get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
    starts = (
        _token_id(tokenizer, tokenizer_config.get("bos_token")),
        generation.get("bos_token_id"),
        config.get("bos_token_id"),
    )
    bos = next((start for start in starts if checked_ids([start], size)), None)
    return TextFiles(
        tokenizer_json=encoded,
        chat_template=_template(path, tokenizer_config),
        generation_config=generation,
        eos_ids=checked_ids(ends, size),
        bos_id=bos,
        adds_bos=puts_before_prompt(tokenizer, bos),
    )


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """Return the id of a token given as text or as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    token_id: int | None = tokenizer.token_to_id(text) if isinstance(text, str) else None
    return token_id


def _template(path: Path, tokenizer_config: dict[str, Any]) -> str:
    """Read the first of chat_template.jinja, chat_template.json and tokenizer_config.json."""
    if (path / "chat_template.jinja").exists():
        files = {"default": path / "chat_template.jinja"}
        files |= {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        templates = {
            name: read_bytes(file).decode("utf-8", "replace") for name, file in files.items()
        }
        return with_token_names(one_template(templates), _token_names(tokenizer_config))
    template = read_json_if_exists(path / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {e["name"]: e.get("template") for e in template if _is_named(e)}
    if isinstance(template, str):
        template = {"default": template}
    templates = template if isinstance(template, dict) else {}
    texts = {name: text for name, text in templates.items() if isinstance(text, str)}
    return with_token_names(one_template(texts), _token_names(tokenizer_config))


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)


def _token_names(tokenizer_config: dict[str, Any]) -> dict[str, str | None]:
    """Return the special tokens of tokenizer_config.json by name. Omit bos and eos, whose ids come
    from the model, unless the file says that the model has none."""
    tokens = {name: token for name, token in tokenizer_config.items() if name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        tokens |= tokenizer_config[key] if isinstance(tokenizer_config.get(key), dict) else {}
    names: dict[str, str | None] = {}
    for name, token in tokens.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name in ("bos_token", "eos_token"):
            if token is None:
                names[name] = None
        elif isinstance(text, str):
            names[name] = text
    return names
