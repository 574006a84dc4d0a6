"""Compare the tokens of two ways to run the same requests, and explain every difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.engine.api.request import ChoiceState, NewTokens, Request, SamplingParams
from pdserve.engine.engine import Engine
from pdserve.kernels.reference.noise import gumbel_noise

NEAR_TIE = 1e-3  # between the two best scores: logits, or logits / T + noise
Tokens = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which the answers to one request differ."""

    mode: str
    key: str
    position: int
    expected: int
    got: int
    gap: float  # between the two best scores there, by the reference model

    @property
    def near_tie(self) -> bool:
        return self.gap <= NEAR_TIE


def requests(
    prompts: Sequence[tuple[int, ...]], temperature: float, new: int = 32
) -> dict[str, Request]:
    """One request per prompt; eos does not end it, so that every position is compared."""
    params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
    kind = "greedy" if temperature == 0 else "seeded"
    return {
        f"{kind}-{i}": Request(f"{kind}-{i}", ids, params, seed=1000 + i)
        for i, ids in enumerate(prompts)
    }


def run(engine: Engine, asked: Sequence[Request], width: int) -> dict[str, tuple[int, ...]]:
    """Run `asked` through the engine, at most `width` at a time."""
    waiting = list(reversed(asked))
    tokens: dict[str, list[int]] = {r.key: [] for r in asked}
    live: set[str] = set()
    while waiting or live:
        while waiting and len(live) < width:
            request = waiting.pop()
            engine.submit(request)
            live.add(request.key)
        step = engine.step()
        assert step is not None, f"engine idle with {live} unfinished"
        for event in step.events:
            if isinstance(event, NewTokens):
                tokens[event.key].extend(event.ids)
                if event.finish is not None:
                    live.discard(event.key)
    return {key: tuple(ids) for key, ids in tokens.items()}


def resumed_at(request: Request, expected: Sequence[int], cut: int) -> Request:
    """The same request, restarted with its first `cut` tokens already generated."""
    return Request(
        request.key,
        request.prompt_ids,
        request.params,
        request.seed,
        choices=(ChoiceState(tuple(expected[:cut])),),
    )


class Judge:
    """The reference model, which gives the gap between the two best scores at a position."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def gap(self, request: Request, before: Sequence[int]) -> float:
        ids = torch.tensor([[*request.prompt_ids, *before]])
        scores = self.model(ids, logits_to_keep=1).logits[0, -1].float()
        if request.params.temperature > 0:
            noise = gumbel_noise(
                torch.tensor([request.seed]),
                torch.tensor([0]),
                torch.tensor([len(before)]),
                scores.numel(),
            )[0]
            scores = scores / request.params.temperature + noise
        best = scores.topk(2).values
        return float(best[0] - best[1])

    def differences(
        self, mode: str, asked: Mapping[str, Request], expected: Tokens, got: Tokens
    ) -> list[Difference]:
        """The first differing position of every request whose answers differ."""
        found = []
        for key, request in asked.items():
            want, have = expected[key], got[key]
            if want == have:
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b),
                min(len(want), len(have)),
            )
            gap = self.gap(request, want[:at]) if at < len(want) and at < len(have) else 1e9
            expected_id = want[at] if at < len(want) else -1
            got_id = have[at] if at < len(have) else -1
            found.append(Difference(mode, key, at, expected_id, got_id, gap))
        return found
