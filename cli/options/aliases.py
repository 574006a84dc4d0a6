"""Accepts options of vLLM.rs and candle-vllm (aliases) by translating them to options of pdserve.

`translate` rewrites a command line before it is parsed, so that all other code knows one name per
option. Pure.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from pdserve.cli.options.options import OptionError

# alias -> the flag of the same meaning
SAME = {
    "--w": "--model",
    "--m": "--model",
    "--f": "--model",
    "--p": "--port",
    "--max-num-seqs": "--max-running",
    "--max-model-len": "--context-len",
}
WITH_VALUE = (*SAME, "--d", "--pd-url")
BARE = ("--fp8-kvcache", "--pd-server", "--pd-client")
ALIASES = (*WITH_VALUE, *BARE)


def aliases_of(flags: Collection[str]) -> Collection[str]:
    """Return the aliases that a command with these flags accepts: all if it loads a model,
    otherwise none."""
    return ALIASES if {"--model", "--kv-dtype"} <= set(flags) else ()


def translate(command: str, flags: Collection[str], arguments: Sequence[str]) -> list[str]:
    """Replace the aliases in a command line by the flags of `command`, which are in `flags`.

    Raises OptionError for an alias that has no equivalent in pdserve; the message suggests the
    nearest option.
    """
    if not aliases_of(flags):
        return list(arguments)
    pairs = list(_read(arguments))
    aliases = {name: value for name, value in pairs if name in ALIASES}
    if aliases.keys() & {"--w", "--m"} == {"--w", "--m"}:
        raise OptionError("--w and --m both name a model: use only one of them")
    if "--m" in aliases and "--f" in aliases:  # --f is a file in the repository --m
        pairs = [(name, value) for name, value in pairs if name != "--f"]
        pairs[pairs.index(("--m", aliases["--m"]))] = ("--m", f"{aliases['--m']}:{aliases['--f']}")
    elif "--w" in aliases and "--f" in aliases:
        raise OptionError("--w and --f both name a model: use only one of them")
    translated: list[str] = []
    for name, value in pairs:
        if name in SAME and SAME[name] in flags:
            translated += [SAME[name], value]
        elif name in MEANINGS:
            translated += MEANINGS[name](command, value)
        elif name in SAME:
            raise OptionError(f"{name}: `pdserve {command}` has no option {SAME[name]}")
        else:
            translated.append(value)
    return translated


def _read(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (alias, its value) for each alias of a command line, and ("", word) for each other
    word, in order. Raises OptionError if an alias lacks its value."""
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in WITH_VALUE:
            if not equals:
                value = next(remaining, "")
            if not value or value.startswith("--"):
                raise OptionError(f"{name}: a value is required")
            yield name, value
        elif argument in BARE:
            yield argument, ""
        else:
            yield "", argument


def _device(command: str, value: str) -> list[str]:
    if value in ("cpu", "cuda", "0"):
        return ["--device", "cpu" if value == "cpu" else "cuda"]
    if value.isdecimal():
        raise OptionError(
            f"--d {value}: to use GPU {value}, set CUDA_VISIBLE_DEVICES={value} and pass --d 0"
        )
    raise OptionError(
        f"--d {value}: a worker runs on one device, cpu or 0; for several GPUs, start one worker "
        "on each (CUDA_VISIBLE_DEVICES=1 pdserve decode --d 0 ...)"
    )


def _fp8_kvcache(command: str, value: str) -> list[str]:
    raise OptionError(
        "--fp8-kvcache: an fp8 KV cache is not supported; the closest option is --kv-dtype int8"
    )


def _pd_role(name: str, role: str) -> Callable[[str, str], list[str]]:
    def meaning(command: str, value: str) -> list[str]:
        if command == role:
            return []
        if command == "up":
            raise OptionError(
                f"{name}: `pdserve up` starts prefill and decode workers; to start only one kind, "
                f"use `pdserve {role} --routers HOST:PORT`"
            )
        raise OptionError(f"{name}: not an option of `pdserve {command}`; use `pdserve {role}`")

    return meaning


def _pd_url(command: str, value: str) -> list[str]:
    scheme, separator, address = value.partition("://")
    if command == "up":
        raise OptionError(
            "--pd-url: `pdserve up` connects its workers itself; use this option with "
            "`pdserve prefill` and `pdserve decode`, for the router's address"
        )
    if not separator:
        address = value
    elif scheme not in ("tcp", "http"):
        raise OptionError(
            f"--pd-url {value}: write the router's address as tcp://host:port; on one machine, KV "
            "moves through shared memory without a URL (--kv-transport shm)"
        )
    return ["--routers", address.rstrip("/")]


MEANINGS: dict[str, Callable[[str, str], list[str]]] = {
    "--d": _device,
    "--fp8-kvcache": _fp8_kvcache,
    "--pd-server": _pd_role("--pd-server", "prefill"),
    "--pd-client": _pd_role("--pd-client", "decode"),
    "--pd-url": _pd_url,
}
