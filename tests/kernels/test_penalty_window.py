"""Penalties over a window equal those computed from all ids at each step."""

import random
from collections import Counter
from itertools import product
from typing import Any, overload

import pytest
import torch
from builders.sampling_kit import sample, some_logits

from pdserve.kernels import _native, reference
from pdserve.kernels.cpu import CpuSampling
from pdserve.kernels.sampling_ops import StreamSettings

VOCAB = 12
KINDS: list[dict[str, float]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
]
WINDOWS = (0, 1, 2, 5, 9, 14, 10**6)  # over prompts of 0, 1 and 9 ids and 30 generated ids
PROMPT_LENS = (0, 1, 9)


def penalized(logits: torch.Tensor, one: StreamSettings, generated: list[int]) -> torch.Tensor:
    """Return the edited scores [vocab], computed id by id with float32 steps."""
    ids = [*one.prompt_ids, *generated]
    if one.penalty_window:
        repeated = counts = Counter(ids[-one.penalty_window :])
    else:
        repeated, counts = Counter(ids), Counter(generated)
    scores = logits.clone()
    for token in repeated:
        score = scores[token]
        by = one.repetition_penalty
        score = score / by if score > 0 else score * by
        if counts[token]:
            score = score - one.presence_penalty
            score = score - one.frequency_penalty * torch.tensor(float(counts[token]))
        scores[token] = score
    return scores


def growing(seed: int) -> list[list[int]]:
    """Return growing lists of ids, up to 30 or more; each adds a few ids."""
    rng = random.Random(seed)
    ids: list[int] = []
    states = []
    while len(ids) < 30:
        ids = ids + [rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 1, 1, 2, 7)))]
        states.append(ids)
    return states


def test_the_reference_equals_edits_from_all_ids(subtests: pytest.Subtests) -> None:
    matters = 0
    for kind, window, prompt_len in product(KINDS, WINDOWS, PROMPT_LENS):
        with subtests.test(kind=kind, window=window, prompt_len=prompt_len):
            rng = random.Random(prompt_len)
            prompt = tuple(rng.randrange(VOCAB) for _ in range(prompt_len))
            one = StreamSettings(penalty_window=window, prompt_ids=prompt, **kind)  # type: ignore[arg-type]
            everything = StreamSettings(prompt_ids=prompt, **kind)  # type: ignore[arg-type]
            edits = reference.stream(one, VOCAB).edits(torch.device("cpu"))
            for turn, generated in enumerate(growing(window + prompt_len)):
                (logits,) = some_logits(turn, 1, VOCAB, 1.0)
                scores = logits.clone()
                edits.apply(scores, generated)
                expected = penalized(logits, one, generated)
                assert torch.equal(scores, expected)
                matters += not torch.equal(expected, penalized(logits, everything, generated))
    assert matters > 500


def test_native_samples_equal_those_from_all_ids(subtests: pytest.Subtests) -> None:
    ops = CpuSampling(_native.Context(1))  # edit code is the same for every ISA
    for kind, window, prompt_len in product(KINDS, WINDOWS, PROMPT_LENS):
        with subtests.test(kind=kind, window=window, prompt_len=prompt_len):
            rng = random.Random(prompt_len)
            prompt = tuple(rng.randrange(VOCAB) for _ in range(prompt_len))
            one = StreamSettings(penalty_window=window, prompt_ids=prompt, **kind)  # type: ignore[arg-type]
            stream = ops.stream(one, VOCAB)
            seen = set()
            for turn, generated in enumerate(growing(window + prompt_len)):
                # Close scores, so that penalties decide.
                logits = some_logits(turn, 1, VOCAB, 0.4) + 1
                expected = int(penalized(logits[0], one, generated).argmax())
                assert ops.sample(logits, [0], [stream], [generated]) == [expected]
                assert sample(ops, logits, [one], [generated]) == [expected]
                seen.add(expected)
            assert len(seen) > 1


def test_an_id_leaves_the_window_after_its_length(subtests: pytest.Subtests) -> None:
    """A penalty that excludes an id allows it again afterwards, also across the border of prompt
    and output."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for ops in (reference, CpuSampling(_native.Context(1))):
        for window in (1, 2, 3):
            with subtests.test(ops=type(ops), window=window):
                one = StreamSettings(
                    frequency_penalty=50.0, penalty_window=window, prompt_ids=(2, 1, 0)
                )
                ids: list[int] = []
                for _ in range(8):
                    ids += sample(ops, logits, [one], [ids])
                # The prompt ends with the best ids; afterwards they take turns.
                turns = {1: [1, 0, 1, 0, 1, 0, 1, 0], 2: [2, 1, 0, 2, 1, 0, 2, 1]}
                expected = turns.get(window, [3, 2, 1, 0, 3, 2, 1, 0])
                assert ids == expected


class Watched(list[int]):
    """List that counts the ids read through its slices."""

    num_read = 0

    @overload
    def __getitem__(self, at: Any) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def test_a_step_reads_only_ids_that_enter_or_leave_the_window() -> None:
    for window in (0, 100, 500, 10**6):
        prompt, generated = Watched(range(400)), Watched()
        one = StreamSettings(presence_penalty=1.0, penalty_window=window, prompt_ids=prompt)
        held = Counter(prompt[-window:] if window else ())
        prompt.num_read = 0
        for step in range(1000):
            generated.append(step)
            entered, left = one.penalty_changes(generated, step)
            held.update(entered)
            held.subtract(left)
        assert prompt.num_read + generated.num_read <= 2 * 1000
        expected = [*prompt, *generated][-window:] if window else generated
        assert +held == Counter(expected)
