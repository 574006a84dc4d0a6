"""Run the examples of docs/python.md as written, and check that they cover every public name."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from builders.tiny_embedder import write_embedder

import pdserve

PAGE = (Path(__file__).parents[2] / "docs/python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EMBEDDER = "Qwen/Qwen3-Embedding-0.6B"  # which a test does not download
AFTER = 'print("block {} has ended")\n'


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_the_examples_run(tmp_path: Path) -> None:
    """Run one after the other, in one process."""
    path = write_embedder(tmp_path / "embedder", "qwen3")
    assert sum(EMBEDDER in block for block in BLOCKS) == 2
    code = "".join(
        block.replace(EMBEDDER, str(path)) + AFTER.format(n) for n, block in enumerate(BLOCKS)
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    parts = re.split(r"block \d+ has ended\n", done.stdout)
    assert len(parts) == len(BLOCKS) + 1
    silent = [block for block, part in zip(BLOCKS, parts, strict=False) if len(part.split()) < 1]
    assert silent == []
    for said in ("Paris", "yes", "tool_calls", "its request has ended, too", "no/such/model"):
        assert said in done.stdout
    assert "prompts 100%" in done.stderr


def members(kind: type) -> list[str]:
    """Return its public methods, properties and fields."""
    own = [field.name for field in fields(kind)] if is_dataclass(kind) else []
    return own + [name for name in vars(kind) if not name.startswith("_") and name not in own]


def test_every_public_name_is_in_an_example() -> None:
    code = "\n".join(BLOCKS)
    assert [name for name in pdserve.__all__ if not re.search(rf"\b{name}\b", code)] == []
    found = re.findall(r"from pdserve import (\([^)]*\)|.+)", code)
    assert {name for names in found for name in re.findall(r"\w+", names)} == {*pdserve.__all__}


@pytest.mark.parametrize(("variable", "kind"), [("llm", pdserve.LLM), ("engine", pdserve.Engine)])
def test_every_public_method_is_in_an_example(variable: str, kind: type) -> None:
    code = "\n".join(BLOCKS).replace("embedder.", "llm.")
    public = members(kind)
    assert len(public) > 8
    assert [name for name in public if not re.search(rf"\b{variable}\.{name}\b", code)] == []
    assert all(inspect.getdoc(getattr(kind, name)) for name in public)


def test_every_field_is_on_the_page() -> None:
    kinds = (
        pdserve.SamplingParams,
        pdserve.StructuredOutputsParams,
        pdserve.RequestOutput,
        pdserve.CompletionOutput,
        pdserve.OutputDelta,
        pdserve.Logprob,
    )
    for kind in kinds:
        listed = [field.name for field in fields(kind) if field.init]
        missing = [name for name in listed if not re.search(rf"\b{name}\b", PAGE)]
        assert missing == [], kind


def test_llm_and_engine_have_the_same_methods() -> None:
    assert {*members(pdserve.LLM)} | {"start"} == {*members(pdserve.Engine)}
