"""A device whose sampled tokens the host reads late, and an engine that launches each step before
it has collected the previous one.
"""

from typing import Any

import torch

from pdserve.engine.api import Step
from pdserve.engine.engine import Engine, Pending
from pdserve.kernels import reference


class LateTokens:
    """The sampled tokens of one step."""

    def __init__(self, tokens: list[int], owner: "LateSampling") -> None:
        self.tokens = torch.tensor(tokens)
        self._owner = owner

    def read(self) -> list[int]:
        self._owner.unread -= 1
        return self.tokens.tolist()


class LateSampling:
    """The reference's sampling; `begin` samples for streams that only count their tokens."""

    stream = staticmethod(reference.stream)
    sample = staticmethod(reference.sample)
    logprobs = staticmethod(reference.logprobs)

    def __init__(self) -> None:
        self.unread = 0
        self.ahead = 0  # steps launched before the previous one was read
        self.error = ""  # of the next steps

    def begin(
        self, logits: Any, rows: list[int], streams: list[Any], num_generated: list[int]
    ) -> LateTokens:
        if self.error:
            raise RuntimeError(self.error)
        self.ahead += self.unread > 0
        self.unread += 1
        unknown = [[-1] * count for count in num_generated]
        return LateTokens(reference.sample(logits, rows, streams, unknown), self)


class AheadEngine(Engine):
    """An engine whose `step` is a turn of the engine thread."""

    ahead: Pending | None = None
    sampling: LateSampling

    def step(self) -> Step | None:
        pending, self.ahead = self.ahead, None
        if pending is None:
            plan = self.schedule()
            if plan is None:
                return None
            pending = self.launch(plan)
        self.ahead = self.launch_ahead(pending)
        return self.collect(pending)
