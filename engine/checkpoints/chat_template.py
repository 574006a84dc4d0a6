"""Builds one chat template from a model's named templates and its special tokens.

The result is self-contained jinja2 source, so that a gateway of any release can render it.
"""

import json
from collections.abc import Mapping


def one_template(templates: Mapping[str, str]) -> str:
    """Return the template `default`, or else the first; it switches to `tool_use` if a request has
    tools, like transformers. Empty if `templates` is empty."""
    default = templates.get("default", next(iter(templates.values()), ""))
    with_tools = templates.get("tool_use", default)
    if with_tools == default:
        return default
    # A plus sign keeps the white space next to a tag; jinja2 drops the last line break.
    first, second = (source.removesuffix("\n") for source in (with_tools, default))
    return f"{{% if tools +%}}{first}{{%+ else +%}}{second}{{%+ endif %}}"


def with_token_names(source: str, tokens: Mapping[str, str | None]) -> str:
    """Return the template with assignments of the special tokens whose names it uses. Tokens that
    are None become undefined, which overrides the gateway's value."""
    values = {
        name: "undefined" if text is None else json.dumps(text, ensure_ascii=False)
        for name, text in tokens.items()
        if name.isidentifier() and name in source
    }
    return "".join(f"{{% set {name} = {text} +%}}" for name, text in values.items()) + source
