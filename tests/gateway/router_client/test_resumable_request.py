"""The state of a request between gateway and router: token ids continue exactly after any event."""

from hypothesis import event, given, settings
from hypothesis import strategies as st

from pdserve.gateway.router_client.resumable_request import ResumableRequest
from pdserve.protos import common_pb2 as pb
from pdserve.protos import router_pb2
from pdserve.services.common.rpc import NumberedChoice

Event = router_pb2.RequestEvent
ANSWER = list(range(1000, 1020))


def tokens(epoch: int, position: int, ids: list[int], finish: int = 0) -> Event:
    scores = [pb.TokenLogprob(logprob=-float(token)) for token in ids]
    return Event(
        tokens=pb.Tokens(
            request="r", epoch=epoch, position=position, ids=ids, logprobs=scores, finish=finish
        )
    )


def choice(epoch: int) -> NumberedChoice:
    return NumberedChoice("r", b"a", epoch, 0)


def start(**fields) -> pb.Start:
    return pb.Start(request="r", **({"prompt_ids": [1, 2]} | fields))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 6), st.booleans()), max_size=40))
def test_ids_continue_through_repeats_old_epochs_and_reissues(pieces):
    """Routers send overlapping pieces of any epoch, with re-issues in between."""
    request = ResumableRequest(start(), 0.0)
    first = request.issue(0.0)
    assert first is not None
    epoch, got = first.epoch, []
    for position, length, reissue in pieces:
        if reissue:
            again = request.issue(1.0)
            assert again is not None
            assert again.epoch == epoch + 1
            epoch = again.epoch
            assert (list(again.choices[0].generated_ids) if again.choices else []) == got
            stale = tokens(epoch - 1, len(got), ANSWER[len(got) :][:1])
            assert request.take(stale) is None
        position = min(position, len(got))  # a router never leaves a gap
        if length == 1:  # as a row; a row of an old epoch is ignored
            assert request.take_as_event(choice(epoch - 1), len(got), 7) is None
            taken = request.take_as_event(choice(epoch), position, ANSWER[position])
            assert (taken is None) == (position < len(got))
            got += [] if taken is None else taken.tokens.ids
            event("a row was taken" if taken else "a row was repeated")
            continue
        taken = request.take(tokens(epoch, position, ANSWER[position : position + length]))
        if taken is not None:
            assert taken.tokens.position == len(got)
            assert len(taken.tokens.logprobs) == len(taken.tokens.ids) > 0
            got += taken.tokens.ids
            event("a piece was taken")
    assert got == ANSWER[: len(got)]


def test_a_gap_fails_the_request() -> None:
    request = ResumableRequest(start(), 0.0)
    request.issue(0.0)
    taken = request.take(tokens(0, 1, [5]))
    assert taken is not None
    assert taken.failed.failure.code == pb.INTERNAL
    assert request.take(tokens(0, 0, [5])) is None


def test_a_gap_in_rows_fails_the_request() -> None:
    request = ResumableRequest(start(), 0.0)
    request.issue(0.0)
    assert request.take(tokens(0, 0, [5])) is not None
    taken = request.take_as_event(choice(0), 2, 5)
    assert taken is not None
    assert taken.failed.failure.code == pb.INTERNAL
    assert request.take_as_event(choice(0), 1, 5) is None


def test_remaining_time_decreases_to_zero() -> None:
    request = ResumableRequest(start(remaining_ms=1000, queue_remaining_ms=400), 10.0)
    first = request.issue(10.25)
    assert first is not None
    assert (first.remaining_ms, first.queue_remaining_ms) == (750, 150)
    again = request.issue(10.75)
    assert again is not None
    assert (again.remaining_ms, again.queue_remaining_ms) == (250, 1)
    assert request.issue(11.0) is None
    assert request.expired(11.0)


def test_the_priority_is_kept_on_reissue() -> None:
    request = ResumableRequest(start(priority=-7), 0.0)
    for _ in range(2):
        issued = request.issue(0.0)
        assert issued is not None
        assert issued.priority == -7


def test_a_finished_choice_is_not_requested_again() -> None:
    request = ResumableRequest(start(params=pb.SamplingParams(n=2)), 0.0)
    request.issue(0.0)
    assert request.take(tokens(0, 0, [5], pb.STOP)) is not None
    again = request.issue(1.0)
    assert again is not None
    assert [choice.finish for choice in again.choices] == [pb.STOP, 0]
    request.abort([1])
    assert request.issue(2.0) is None
    assert request.finish() is not None
    assert request.finish() is None


def test_prompt_logprobs_are_returned_once_in_parts() -> None:
    params = pb.SamplingParams(prompt_logprobs=1)
    request = ResumableRequest(start(params=params, prompt_ids=[1, 2, 3, 4, 5]), 0.0)
    request.issue(0.0)
    truth = [pb.TokenLogprob(logprob=-i) for i in range(1, 5)]

    def scored(begin: int, end: int) -> Event:
        part = pb.PromptLogprobs(request="r", position=begin, logprobs=truth[begin - 1 : end - 1])
        return Event(prompt_logprobs=part)

    assert request.take(scored(1, 3)) == scored(1, 3)
    again = request.issue(1.0)
    assert again is not None
    assert again.params.HasField("prompt_logprobs"), "the re-issued request must ask for the rest"
    assert request.take(scored(1, 2)) is None
    assert request.take(scored(2, 5)) == scored(3, 5)
    assert request.take(scored(1, 5)) is None
    again = request.issue(1.0)
    assert again is not None
    assert not again.params.HasField("prompt_logprobs")


def test_an_embedding_is_returned_once_and_ends_the_request() -> None:
    request = ResumableRequest(start(pool=True), 0.0)
    request.issue(0.0)

    def embedding(epoch: int) -> Event:
        return Event(embedding=pb.Embedding(request="r", epoch=epoch, values=[1.0, 2.0]))

    again = request.issue(1.0)
    assert again is not None
    assert again.pool
    assert request.take(embedding(again.epoch - 1)) is None, (
        "an embedding of an old epoch must be ignored"
    )
    assert request.take(embedding(again.epoch)) == embedding(again.epoch)
    assert request.take(embedding(again.epoch)) is None
    assert request.issue(2.0) is None
    assert request.finish() is not None


def test_a_gap_in_prompt_logprobs_fails_the_request() -> None:
    params = pb.SamplingParams(prompt_logprobs=1)
    request = ResumableRequest(start(params=params, prompt_ids=[1, 2, 3, 4, 5]), 0.0)
    part = pb.PromptLogprobs(request="r", position=2, logprobs=[pb.TokenLogprob()])
    taken = request.take(Event(prompt_logprobs=part))
    assert taken is not None
    assert taken.failed.failure.code == pb.INTERNAL


def test_a_terminal_event_of_an_old_epoch_is_ignored() -> None:
    request = ResumableRequest(start(), 0.0)
    request.issue(0.0)
    request.issue(1.0)
    old = Event(failed=pb.Failed(request="r", epoch=0))
    assert request.take(old) is None
    now = Event(finished=pb.Finished(request="r", epoch=1))
    assert request.take(now) is now
    assert request.ended
    assert request.take(now) is None


def test_placement_and_crash_count_are_sent_on_reissue() -> None:
    request = ResumableRequest(start(crash_count=0), 0.0)
    request.issue(0.0)
    assert not request.placed
    placement = pb.Placement(attempt=b"a" * 16, decode_incarnation=b"d" * 16, decode_address="d:1")
    placed = router_pb2.Placed(request="r", epoch=0, placement=placement, crash_count=1)
    assert request.take(Event(placed=placed)) is not None
    assert request.placed
    again = request.issue(1.0)
    assert again is not None
    assert (again.epoch, again.placement, again.crash_count) == (1, placement, 1)
