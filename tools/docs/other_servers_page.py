"""Print docs/other-servers.md, generated from the table of foreign options.

`make docs` writes the page, tests/test_docs.py compares it.
"""

from collections.abc import Iterable, Iterator

from pdserve.cli.foreign.entries import Implied, Lacking, Renamed, Sampling
from pdserve.cli.foreign.table import COMMANDS, NO_COMMANDS, TABLE

HEAD = """\
# Options of other servers

`pdserve up`, `run`, `prefill`, `decode` and `gateway` accept flags of vLLM, SGLang, llama.cpp
(llama-server), Ollama, vLLM.rs, candle-vllm and vllm-lite. `make docs` writes this page from the
table in cli/foreign/table.py; [options.md](options.md#names-of-other-servers) says which meaning a
name has that differs between servers.

A name in capitals is an environment variable: pdserve does not read it, but prints what to pass
instead. A key of another server in the `--config` file is an error that names the key of pdserve.
"""


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield "## With an equivalent\n"
    yield "| option | pdserve |"
    yield "|---|---|"
    for entry in TABLE:
        if isinstance(entry, Renamed):
            limit = f" (`pdserve {'`, `pdserve '.join(entry.commands)}`)" if entry.commands else ""
            yield f"| {_names(entry.names)} | {entry.shown or f'`{entry.flag}`'}{limit} |"
        elif isinstance(entry, Sampling):
            yield f"| {_names(entry.names)} | `{entry.key}` of `--override-generation-config` |"
    yield "\n## Accepted, because pdserve does it anyway\n"
    yield "| option | |"
    yield "|---|---|"
    for entry in TABLE:
        if isinstance(entry, Implied):
            limit = f" (`pdserve {'`, `pdserve '.join(entry.commands)}`)" if entry.commands else ""
            yield f"| {_names(entry.names)} | {entry.because}{limit} |"
    yield "\n## Without an equivalent\n"
    yield "| option | what to use instead |"
    yield "|---|---|"
    for entry in TABLE:
        if isinstance(entry, Lacking):
            yield f"| {_names(entry.names)} | {_plain(entry.sentence)} |"
    yield "\n## Commands\n"
    yield "| command | pdserve |"
    yield "|---|---|"
    for name, own in COMMANDS.items():
        yield f"| `{name}` | `pdserve {own}` |"
    for name, sentence in NO_COMMANDS.items():
        yield f"| `{name}` | {_plain(sentence)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(sentence: str) -> str:
    return sentence.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
