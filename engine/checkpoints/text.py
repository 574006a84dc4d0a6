"""The properties of a model that concern text: one chat template made from its files, and facts
that only the tokenizer knows.

The template is self-contained jinja2 source, so that a gateway of any release can render it.
"""

import json
from collections.abc import Iterable, Mapping

from tokenizers import Tokenizer

from pdserve.engine.checkpoints.source import CheckpointError

# Tokens other than eos with which templates end a turn; tokens that end a part of one are excluded.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endofturn|>")


def one_template(templates: Mapping[str, str]) -> str:
    """Merge a model's chat templates into one. It is the template named `default`, or else the
    first, and for requests with tools the template `tool_use`, like in transformers. Empty if there
    are none."""
    default = templates.get("default", next(iter(templates.values()), ""))
    with_tools = templates.get("tool_use", default)
    if with_tools == default:
        return default
    # A plus sign keeps the white space next to a tag; jinja2 drops the last line break.
    first, second = (source.removesuffix("\n") for source in (with_tools, default))
    return f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


def with_token_names(source: str, tokens: Mapping[str, str | None]) -> str:
    """Return the chat template `source`, preceded by assignments of the special tokens that it
    names. A token that is None becomes undefined, even if the gateway sets it."""
    values = {
        name: "undefined" if text is None else json.dumps(text, ensure_ascii=False)
        for name, text in tokens.items()
        if name.isidentifier() and name in source
    }
    return "".join(f"{{% set {name} = {text} +%}}" for name, text in values.items()) + source


def load_tokenizer(tokenizer_json: bytes) -> Tokenizer:
    """Load a tokenizer from the bytes of tokenizer.json. Raises CheckpointError if they are not
    valid."""
    try:
        return Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the package raises nothing narrower
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from error


def puts_before_prompt(tokenizer: Tokenizer, bos_id: int | None) -> bool:
    """Return whether the tokenizer puts `bos_id` before an encoded text."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return bos_id is not None and ids[:1] == [bos_id]


def turn_end_ids(tokenizer: Tokenizer, template: str) -> set[int]:
    """Return the ids of the usual end-of-turn tokens that occur in the chat template and the
    vocabulary."""
    ids = (tokenizer.token_to_id(text) for text in TURN_ENDS if text in template)
    return {token_id for token_id in ids if token_id is not None}


def checked_ids(ids: Iterable[object], vocab_size: int) -> tuple[int, ...]:
    """Return the ids that are integers within the vocabulary, each once, in order. Files may have
    missing ids or -1 for none."""
    integers = (i for i in ids if isinstance(i, int) and not isinstance(i, bool))
    return tuple(dict.fromkeys(i for i in integers if 0 <= i < vocab_size))
