"""What `pdserve up` prints once it is ready: its addresses, and commands to copy; pure."""

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any
from urllib.parse import urlsplit

from pdserve.cli.options import DEFAULT_URL

# By the task of a model: the route and the body of a first request, without its model.
FIRST_REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "complete": ("completions", {"prompt": "Once upon a time", "max_tokens": 40}),
    "embed": ("embeddings", {"input": "Hello!"}),
    "score": ("rerank", {"query": "What is rain?", "documents": ["Water.", "A stone."]}),
}


@dataclass(frozen=True, slots=True)
class Banner:
    """The facts about a running system that its user needs first.

    `url`, `grpc` and `ids` are the addresses of the HTTP API, of the gRPC API for text and of the
    one for token ids. `task`: a key of FIRST_REQUESTS. `database` describes where data is kept;
    empty if the user has chosen that. `program` is the command that starts pdserve.
    """

    seconds: float
    url: str
    grpc: str
    ids: str
    model: str
    task: str
    needs_key: bool
    database: str
    program: str

    @property
    def ready(self) -> str:
        """One line with all addresses, for logs."""
        return (
            f"pdserve is ready after {self.seconds:.1f} s at {self.url} "
            f"(gRPC: text at {self.grpc}, ids at {self.ids})"
        )

    def text(self) -> str:
        """Return the banner as lines of at most 80 columns, unless a name or address is long."""
        rows = [("API", f"{self.url}/v1 (Anthropic, Ollama: without /v1)")]
        rows += [("gRPC", f"text at {self.grpc}, token ids at {self.ids}")]
        if self.task == "chat":
            rows.insert(0, ("chat page", f"{self.url}/"))
        if self.database:
            rows.append(("data", self.database))
        lines = [f"pdserve is ready after {self.seconds:.1f} s at {self.url}", ""]
        lines += [f"  {name:10} {value}" for name, value in rows]
        lines += ["", self._curl(), ""]
        if self.task == "chat":
            url = "" if self.url == DEFAULT_URL else f" --url {self.url}"
            key = " --api-key YOUR_KEY" if self.needs_key else ""
            lines += ["or type in another terminal", "", f"  {self.program} chat{url}{key}", ""]
        elif self.task == "complete":
            lines += [f"{self.model} has no chat template: it completes text.", ""]
        return "\n".join(["", *lines, "Press Ctrl-C to stop.", ""])

    def _curl(self) -> str:
        route, rest = FIRST_REQUESTS[self.task]
        body = f"{json.dumps({'model': self.model})[:-1]},\n         {json.dumps(rest)[1:]}"
        headers = ["Content-Type: application/json"]
        headers += ["Authorization: Bearer YOUR_KEY"] if self.needs_key else []
        words = [f"curl {self.url}/v1/{route}", *(f"-H {quote(header)}" for header in headers)]
        return "  " + " \\\n    ".join([*words, f"-d {quote(body)}"])


def local_url(url: str) -> str:
    """Return the URL at which this machine's programs reach a server that listens at `url`: the
    loopback address replaces one that means all addresses, such as 0.0.0.0."""
    scheme, separator, address = url.rpartition("://")
    host = urlsplit(f"//{address}").hostname or ""
    try:
        means_all = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return url
    if not means_all:
        return url
    loopback = "[::1]" if ":" in host else "127.0.0.1"
    return f"{scheme}{separator}{loopback}:{address.rpartition(':')[2]}"
