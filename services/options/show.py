"""`pdserve config show`: the resolved options as a YAML file, with the source of each value.

The output never contains a secret: its line is a comment with a mask, so the file stays loadable.
"""

from typing import Any

import yaml

from pdserve.services.options.sources import Settings

MASK = "********"


def render(settings: Settings) -> str:
    """Return one line per option: `key: value  # source`."""
    pairs = []
    for option in settings.options():
        resolved = settings.values[option.name]
        if option.secret and resolved.value:
            pairs.append((f"# {option.name}: {MASK}", resolved.source))
        else:
            pairs.append((f"{option.name}: {_yaml(resolved.value)}", resolved.source))
    width = min(max(len(text) for text, _ in pairs), 48)
    return "\n".join(f"{text:{width}}  # {source}" for text, source in pairs) + "\n"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
