"""Aliases: options of vLLM.rs and candle-vllm, translated to options of pdserve.

`translate` rewrites a command line before parsing, so that all other code knows one name per
option. Pure.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

from pdserve.services.options.options import OptionError

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
    """Return the aliases of a command with these flags: all if it loads a model, else none."""
    return ALIASES if {"--model", "--kv-dtype"} <= set(flags) else ()


def translate(command: str, flags: Collection[str], words: Sequence[str]) -> list[str]:
    """Replace the aliases in `words` by flags of the command, which has `flags`.

    Raises OptionError for an alias that has no equivalent here; the message names the nearest one.
    """
    if not aliases_of(flags):
        return list(words)
    read = list(_read(words))
    given = {name: value for name, value in read if name in ALIASES}
    if given.keys() & {"--w", "--m"} == {"--w", "--m"}:
        raise OptionError("--w and --m both name a model: give one")
    if "--m" in given and "--f" in given:  # --f is a file in the repository --m
        read = [(name, value) for name, value in read if name != "--f"]
        read[read.index(("--m", given["--m"]))] = ("--m", f"{given['--m']}:{given['--f']}")
    elif "--w" in given and "--f" in given:
        raise OptionError("--w and --f both name a model: give one")
    out: list[str] = []
    for name, value in read:
        if name in SAME and SAME[name] in flags:
            out += [SAME[name], value]
        elif name in MEANINGS:
            out += MEANINGS[name](command, value)
        elif name in SAME:
            raise OptionError(f"{name}: `pdserve {command}` has no {SAME[name]}")
        else:
            out.append(value)
    return out


def _read(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (alias, its value) or ("", word), in order."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in WITH_VALUE:
            if not equals:
                value = next(rest, "")
            if not value or value.startswith("--"):
                raise OptionError(f"{name}: it needs a value")
            yield name, value
        elif word in BARE:
            yield word, ""
        else:
            yield "", word


def _device(command: str, value: str) -> list[str]:
    if value in ("cpu", "cuda", "0"):
        return ["--device", "cpu" if value == "cpu" else "cuda"]
    if value.isdecimal():
        raise OptionError(
            f"--d {value}: choose that GPU with CUDA_VISIBLE_DEVICES={value} and --d 0"
        )
    raise OptionError(
        f"--d {value}: a worker runs on one device, cpu or 0; for several GPUs start a worker on "
        "each (CUDA_VISIBLE_DEVICES=1 pdserve decode --d 0 ...)"
    )


def _fp8_kvcache(command: str, value: str) -> list[str]:
    raise OptionError("--fp8-kvcache: there is no fp8 KV cache; the nearest is --kv-dtype int8")


def _pd_role(name: str, role: str) -> Callable[[str, str], list[str]]:
    def meaning(command: str, value: str) -> list[str]:
        if command == role:
            return []
        if command == "up":
            raise OptionError(
                f"{name}: `pdserve up` starts both sides; one alone is "
                f"`pdserve {role} --routers HOST:PORT`"
            )
        raise OptionError(f"{name}: this is `pdserve {command}`; use `pdserve {role}`")

    return meaning


def _pd_url(command: str, value: str) -> list[str]:
    scheme, found, address = value.partition("://")
    if command == "up":
        raise OptionError(
            "--pd-url: `pdserve up` connects its workers itself; `pdserve prefill` and "
            "`pdserve decode` take the router's address with it"
        )
    if not found:
        address = value
    elif scheme not in ("tcp", "http"):
        raise OptionError(
            f"--pd-url {value}: name the router as tcp://host:port; on one machine KV goes through "
            "shared memory without a URL (--kv-transport shm)"
        )
    return ["--routers", address.rstrip("/")]


MEANINGS: dict[str, Callable[[str, str], list[str]]] = {
    "--d": _device,
    "--fp8-kvcache": _fp8_kvcache,
    "--pd-server": _pd_role("--pd-server", "prefill"),
    "--pd-client": _pd_role("--pd-client", "decode"),
    "--pd-url": _pd_url,
}
