"""One chat template of what a model's files have: several by name, and the names of special tokens.

It is jinja2 source that needs nothing beside it, so that a gateway of any release renders it.
"""

import json
from collections.abc import Mapping


def one_template(named: Mapping[str, str]) -> str:
    """The template named `default`, or else the first; `tool_use` in its place where there are
    tools, as transformers chooses. Empty if there is none."""
    default = named.get("default", next(iter(named.values()), ""))
    with_tools = named.get("tool_use", default)
    if with_tools == default:
        return default
    # A plus sign keeps the white space beside a tag; jinja2 drops a last line break itself.
    first, second = (source.removesuffix("\n") for source in (with_tools, default))
    return f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


def with_token_names(source: str, tokens: Mapping[str, str | None]) -> str:
    """The template with the texts of special tokens under the names that it writes; those that are
    None are undefined, whatever the gateway says of them."""
    values = {
        name: "undefined" if text is None else json.dumps(text, ensure_ascii=False)
        for name, text in tokens.items()
        if name.isidentifier() and name in source
    }
    return "".join(f"{{% set {name} = {text} +%}}" for name, text in values.items()) + source
