"""Lines of waiting requests."""

from dataclasses import dataclass
from random import Random

from pdserve.services.router.placement.queues import Queues


@dataclass(eq=False)
class Asker:
    ordinal: int
    model: str


def test_each_line_is_in_order_of_arrival_whoever_leaves_or_comes_back() -> None:
    rng = Random(1)
    queues: Queues[Asker] = Queues()
    waiting: list[Asker] = []
    left = back = 0
    for ordinal in range(400):
        waiting.append(Asker(ordinal, rng.choice("ab")))
        queues.add(waiting[-1])
        if rng.random() < 0.5:
            gone = waiting.pop(rng.randrange(len(waiting)))
            queues.remove(gone)
            queues.remove(gone)
            left += 1
            if rng.random() < 0.3:
                queues.add(gone)
                waiting.append(gone)
                back += 1
        assert len(queues) == len(waiting)
        assert set(queues) == set(waiting)
        for model in "ab":
            line = [w for w in waiting if w.model == model]
            assert queues.head(model) is min(line, key=lambda w: w.ordinal, default=None)
        assert set(queues.models) == {w.model for w in waiting}
    assert left > 100 < left - back
    assert back > 30
