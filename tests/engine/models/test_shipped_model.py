"""The shipped model generates the tokens of transformers, in float32 and greedily."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders.engine_kit import ask, run, tokens
from builders.tiny_models import shipped_model
from systems.sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from pdserve.engine.api import EngineConfig
from pdserve.engine.build import build_engine

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

NEW = 32
LENGTHS = (1, 2, 5, 17, 60, 200, 800)


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    """Return the next tokens of transformers; an end of sequence does not end them."""
    step, past = torch.tensor([prompt]), None
    found: list[int] = []
    while len(found) < NEW:
        out = model(step, past_key_values=past, use_cache=True, logits_to_keep=1)
        past = out.past_key_values
        found.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([found[-1:]])
    return found


def test_greedy_tokens_equal_those_of_transformers(subtests: pytest.Subtests) -> None:
    path = shipped_model()
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": path.name,
    }
    text = (ROOT / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(**place).encode(text)
    reference = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    config = EngineConfig(
        kernels="native", weights="float32", kv_dtype="float32", kv_tokens=8192, chunk_size=256
    )
    engine, _ = build_engine(config, lambda *_: None)
    prompts = {f"{n}": ids[n : 2 * n] for n in LENGTHS}
    limits: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True}
    requests = [ask(key, prompt, **limits) for key, prompt in prompts.items()]
    found = tokens(run(engine, *requests))
    for key, prompt in prompts.items():
        with subtests.test(prompt_tokens=key):
            assert found[key, 0] == greedy(reference, prompt)
