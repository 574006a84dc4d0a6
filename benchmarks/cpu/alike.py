"""Run requests in an engine and record everything that must not depend on other requests."""

import random
from collections.abc import Sequence
from dataclasses import replace

from pdserve.engine.api.request import ChoiceState, NewTokens, Request, SamplingParams
from pdserve.engine.engine import Engine

Trace = tuple[tuple[int, float], ...]  # ids with their log-probabilities, to the last bit
Traces = dict[tuple[str, int], Trace]  # by request and choice


def seeded_requests(prompts: Sequence[tuple[int, ...]], new: int) -> list[Request]:
    """One request per prompt, each with different parameters: T = 1, penalties, floors, n = 1 or 2.

    The chosen token's log-probability is returned with each token: a bit that differs anywhere in
    the logits nearly always shows there, even if the token is the same.
    """
    draw = random.Random(4)
    found = []
    for i, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=1.0,
            top_k=draw.choice((0, 0, 40)),
            top_p=draw.choice((1.0, 0.9)),
            min_p=draw.choice((0.0, 0.02)),
            repetition_penalty=draw.choice((1.0, 1.1)),
            presence_penalty=draw.choice((0.0, 0.5)),
            frequency_penalty=draw.choice((0.0, 0.3)),
            ignore_eos=True,
            max_tokens=new,
            logprobs=0,
            n=draw.choice((1, 2)),
        )
        found.append(Request(f"seeded-{i}", ids, params, seed=1000 + i))
    return found


def traces(engine: Engine, asked: Sequence[Request], width: int) -> Traces:
    """Run `asked`, at most `width` at a time, and return their traces; raises RuntimeError if one
    does not end."""
    waiting = list(reversed(asked))
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    live: dict[str, int] = {}  # choices that still run
    while waiting or live:
        while waiting and len(live) < width:
            request = waiting.pop()
            engine.submit(request)
            live[request.key] = request.params.n
        step = engine.step()
        if step is None:
            raise RuntimeError(f"the engine is idle with {sorted(live)} unfinished")
        for event in step.events:
            if isinstance(event, NewTokens):
                values = [p.logprob for p in event.logprobs]
                trace = found.setdefault((event.key, event.choice), [])
                trace += zip(event.ids, values, strict=True)
                if event.finish is not None:
                    live[event.key] -= 1
                    if not live[event.key]:
                        del live[event.key]
    return {key: tuple(trace) for key, trace in found.items()}


def resumed(request: Request, expected: Trace, cut: int) -> Request:
    """The same request with one choice, restarted with its first `cut` tokens generated."""
    ids = tuple(i for i, _ in expected[:cut])
    return replace(request, key=f"{request.key}@{cut}", choices=(ChoiceState(ids),))


def differing(expected: Traces, got: Traces) -> list[str]:
    """Requests whose traces differ in a token or in a bit of a log-probability."""
    keys = sorted(set(expected) | set(got))
    return [f"{key}/{choice}" for key, choice in keys
            if expected.get((key, choice)) != got.get((key, choice))]  # fmt: skip
