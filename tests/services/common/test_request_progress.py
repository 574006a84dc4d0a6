"""A request's progress holds exactly the ids in order, whatever overlaps, repeats or is lost."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import LostTokens, RequestProgress

TRUTH = list(range(100, 140))


def progress(n: int = 1, prompt: list[int] | None = None) -> RequestProgress:
    return RequestProgress(
        pb.Start(request="r", params=pb.SamplingParams(n=n)), prompt or [1, 2, 3]
    )


def message(start: int, end: int, choice: int = 0) -> pb.Tokens:
    finish = pb.LENGTH if end == len(TRUTH) else pb.FINISH_REASON_UNSPECIFIED
    return pb.Tokens(choice=choice, position=start, ids=TRUTH[start:end], finish=finish)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40))))
def test_overlaps_repeats_and_gaps(spans: list[tuple[int, int]]) -> None:
    state, out = progress(), list[int]()
    for a, b in spans:
        start, end = sorted((a, b))
        known = len(out)
        if start > known and not state.complete:
            with pytest.raises(LostTokens):
                state.take(message(start, end))
            continue
        fresh = state.take(message(start, end))
        if fresh is not None:
            assert fresh.position == known
            out += fresh.ids
        assert out == TRUTH[: len(out)]
        assert list(state.choices[0].generated_ids) == out
    assert state.complete == (len(out) == len(TRUTH))


def test_logprobs_are_cut_with_their_ids() -> None:
    state = progress()
    state.take(pb.Tokens(ids=[1, 2]))
    probs = [pb.TokenLogprob(logprob=-float(i)) for i in range(4)]
    fresh = state.take(pb.Tokens(position=0, ids=[1, 2, 3, 4], logprobs=probs))
    assert fresh is not None
    assert [p.logprob for p in fresh.logprobs] == [-2.0, -3.0]


def test_prefix_ids_follow_the_unfinished_choices() -> None:
    state = progress(n=2)
    assert state.prefix_ids() == [1, 2, 3]
    state.take(pb.Tokens(choice=0, ids=[7]))
    state.take(pb.Tokens(choice=1, ids=[8, 9]))
    assert state.prefix_ids() == [1, 2, 3]
    state.abort([0])
    assert state.prefix_ids() == [1, 2, 3, 8, 9]


def test_start_of_a_resume() -> None:
    state = progress(n=2)
    assert not state.to_start(1, 0, 0, 0).choices
    state.take(pb.Tokens(choice=1, ids=[8], finish=pb.STOP))
    start = state.to_start(epoch=4, crash_count=1, remaining_ms=10, queue_ms=0)
    assert [list(c.generated_ids) for c in start.choices] == [[], [8]]
    assert [c.finish for c in start.choices] == [0, pb.STOP]
    assert (start.epoch, start.crash_count, start.remaining_ms) == (4, 1, 10)
    assert not start.prompt_ids


def test_prompt_logprobs_are_accepted_once() -> None:
    params = pb.SamplingParams(prompt_logprobs=2)
    state = RequestProgress(pb.Start(params=params), [1, 2, 3, 4])

    def scores(start: int, end: int) -> pb.PromptLogprobs:
        logprobs = [pb.TokenLogprob(logprob=-i) for i in range(start, end)]
        return pb.PromptLogprobs(position=start, logprobs=logprobs)

    assert state.take_scores(scores(1, 2)) == scores(1, 2)
    assert not state.may_go_remote, "the remaining scores are still wanted"
    assert state.take_scores(scores(1, 2)) is None
    with pytest.raises(LostTokens):
        state.take_scores(scores(3, 4))
    assert state.take_scores(scores(1, 4)) == scores(2, 4)
    assert state.take_scores(scores(1, 4)) is None
    assert state.may_go_remote


def test_a_pooled_request_accepts_only_one_embedding() -> None:
    state = RequestProgress(pb.Start(pool=True), [1, 2, 3])
    assert not state.may_go_remote
    assert state.to_start(2, 0, 0, 0).pool
    embedding = pb.Embedding(values=[1.0])
    assert state.take_embedding(embedding) == embedding
    assert state.complete
    assert state.take_embedding(embedding) is None
    assert progress().take_embedding(embedding) is None, "this request is for no embedding"
    with pytest.raises(ServiceError) as caught:
        RequestProgress(pb.Start(pool=True, params=pb.SamplingParams(n=2)), [1])
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("prompt", "n", "choices", "param"),
    [([], 1, 0, "prompt_ids"), ([1], 129, 0, "n"), ([1], 2, 1, "choices"), ([1], 0, 2, "choices")],
)
def test_invalid_requests_are_refused(prompt: list[int], n: int, choices: int, param: str) -> None:
    start = pb.Start(params=pb.SamplingParams(n=n), choices=[pb.ChoiceState()] * choices)
    with pytest.raises(ServiceError) as caught:
        RequestProgress(start, prompt)
    assert caught.value.param == param


def test_any_order_of_tokens_cancels_and_ends_over_many_seeds() -> None:
    """Compares it with a plain model of each choice: a list of ids and whether it has ended."""
    for seed in range(2000):
        random = Random(seed)
        n = random.randint(1, 4)
        state = progress(n)
        ids: list[list[int]] = [[] for _ in range(n)]
        ended = [False] * n
        for _ in range(40):
            choice = random.randrange(n + 1)
            if choice == n or random.random() < 0.1:
                aborted = random.sample(range(n), random.randint(1, n))
                state.abort(aborted)
                for index in aborted:
                    ended[index] = True
                continue
            if random.random() < 0.5:  # a row: the next id, or another
                at = random.randint(max(0, len(ids[choice]) - 1), len(ids[choice]) + 1)
                fits = not ended[choice] and at == len(ids[choice]) < len(TRUTH) - 1
                if at < len(TRUTH) - 1:
                    assert state.take_next(choice, at, TRUTH[at]) == fits
                if fits:
                    ids[choice].append(TRUTH[at])
                    continue  # requested ids are not checked: the ids still differ
            start = random.randint(max(0, len(ids[choice]) - 5), len(ids[choice]) + 1)
            end = min(len(TRUTH), start + random.randint(0, 6))
            said = message(min(start, end), end, choice)
            if ended[choice]:
                assert state.take(said) is None
            elif start > len(ids[choice]):
                with pytest.raises(LostTokens):
                    state.take(said)
            else:
                state.take(said)
                ids[choice] = TRUTH[: max(len(ids[choice]), end)]
                ended[choice] = bool(said.finish)
            left = [i for i in range(n) if not ended[i]]
            assert [list(c.generated_ids) for c in state.choices] == ids
            assert state.complete == (not left)
            assert state.num_unfinished == len(left)
            assert state.begun == any(ids)
            assert state.prefix_ids() == [1, 2, 3, *(ids[left[0]] if len(left) == 1 else [])]
            again = state.to_start(2, 0, 0, 0)
            found = [list(c.generated_ids) for c in again.choices]
            assert found == (ids if any(ids) or any(ended) else [])
