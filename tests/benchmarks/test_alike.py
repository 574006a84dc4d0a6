"""The comparison of traces, on engines over the fake decoder."""

from alike import differing, resumed, seeded_requests, traces
from builders.engine_kit import ask, fake_engine

from pdserve.engine.api.request import Request


def few() -> list[Request]:
    prompts = [tuple(range(i % 7, i % 7 + 3 + i)) for i in range(6)]
    return seeded_requests(prompts, new=5)


def test_requests_vary_their_parameters_and_are_repeatable() -> None:
    asked = seeded_requests([(1, 2)] * 200, new=5)
    assert asked == seeded_requests([(1, 2)] * 200, new=5)
    assert len({r.seed for r in asked}) == 200
    assert {r.params.n for r in asked} == {1, 2}
    assert len({r.params.repetition_penalty for r in asked}) == 2


def test_an_exact_engine_gives_the_same_traces_alone_and_together() -> None:
    asked = few()
    alone = traces(fake_engine(max_running=12), asked, 1)
    together = traces(fake_engine(max_running=12), asked, 6)
    assert differing(alone, together) == []
    assert set(alone) == {(r.key, c) for r in asked for c in range(r.params.n)}
    assert all(len(trace) == 5 for trace in alone.values())


def test_a_changed_bit_is_reported() -> None:
    first = traces(fake_engine(), [ask("a", [1, 2, 3], logprobs=0)], 1)
    key, trace = next(iter(first.items()))
    changed = {key: ((trace[0][0], trace[0][1] + 1e-12), *trace[1:])}
    assert differing(first, changed) == ["a/0"]
    assert differing(first, {}) == ["a/0"]


def test_a_resumed_request_returns_the_rest() -> None:
    request = ask("a", [1, 2, 3], logprobs=0)
    whole = traces(fake_engine(), [request], 1)["a", 0]
    rest = traces(fake_engine(), [resumed(request, whole, 3)], 1)
    assert rest["a@3", 0] == whole[3:]
