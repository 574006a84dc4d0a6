"""The bounds of sampling in the description of a body that has its fields."""

import math
from typing import Any

from pdserve.engine.api.sampling_bounds import BOUNDS

# Fields with the bounds of another name.
_BOUNDED_AS = {
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "best_of": "n",
}


def bounded(schema: dict[str, Any]) -> None:
    """Writes them where the body's own types have none."""
    for name, field in schema["properties"].items():
        bounds = BOUNDS.get(_BOUNDED_AS.get(name, name))
        for kind in field.get("anyOf", (field,)):
            if bounds is None or kind.get("type") not in ("integer", "number"):
                continue
            kind.setdefault(
                "exclusiveMinimum" if bounds.api.open_low else "minimum", bounds.api.low
            )
            if bounds.api.high < math.inf:
                kind.setdefault("maximum", bounds.api.high)
