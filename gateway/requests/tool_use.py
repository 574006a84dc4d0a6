"""The tools of a chat and how its answer may use them, the same for every API; pure data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call at the client."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # JSON schema of its arguments; None: an object
    strict: bool = False  # force arguments to match the schema
    param: str = ""  # the request's field that `parameters` come from; empty: none
    place: str = ""  # what to name for a fault in `parameters` that the client did not write

    def as_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`tools` are shown to the model, which may call all of them or `only` some."""

    tools: Sequence[Tool]
    choice: Literal["auto", "none", "required"] = "auto"
    only: Sequence[str] = ()  # names of those that may be called; empty: all
    parallel: bool = True  # several calls in one answer
