"""Whatever the pace of the reader, ids and their order per choice stay, and messages stay small."""

import asyncio

import pytest
from eventually import LIMIT_S
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import Placed, RequestEvent
from pdserve.services.host.rpc.outbox import MAX_BATCH_BYTES, MAX_MERGED_IDS, TokensOutbox
from pdserve.services.host.rpc.token_rows import (
    MAX_NUMBERED,
    MAX_ROWS,
    ChoiceNumbers,
    NumberedChoices,
)

steps = st.lists(
    st.tuples(
        st.sampled_from(["tokens", "tokens", "row", "row", "placed", "take", "finish", "retry"]),
        st.integers(0, 2),
        st.integers(1, 5),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps)
def test_merging_changes_no_content_and_no_order(steps: list[tuple[str, int, int, bool]]) -> None:
    outbox = TokensOutbox(RequestEvent)
    position = {0: 0, 1: 0, 2: 0}
    finished: set[int] = set()
    attempt = 0
    put: list[tuple[object, ...]] = []  # one entry per id, in order
    taken: list[tuple[object, ...]] = []
    choices = NumberedChoices()

    def flatten(event: RequestEvent) -> list[tuple[object, ...]]:
        if event.WhichOneof("event") == "placed":
            return [("placed", event.placed.epoch)]
        if event.WhichOneof("event") == "rows":
            return [
                (choice.attempt, choice.choice, at, token, None, 0)
                for choice, at, token in choices.of(event.rows)
            ]
        tokens = event.tokens
        choices.note(tokens)
        rows: list[tuple[object, ...]] = []
        for index, token in enumerate(tokens.ids):
            logprob = tokens.logprobs[index].logprob if tokens.logprobs else None
            last = index == len(tokens.ids) - 1
            finish = tokens.finish if last else 0
            at = tokens.position + index
            rows.append((tokens.attempt, tokens.choice, at, token, logprob, finish))
        return rows

    for number, (kind, choice, count, with_logprobs) in enumerate(steps):
        if kind == "take":
            taken += [row for event in outbox.take() for row in flatten(event)]
        elif kind == "placed":
            event = RequestEvent(placed=Placed(epoch=number))
            put += flatten(event)
            outbox.put(event)
        elif kind == "retry":
            attempt += 1
        elif choice in finished:
            continue
        elif kind == "row":
            at = position[choice]
            if outbox.put_token(bytes([attempt]), 0, choice, at, number):
                put.append((bytes([attempt]), choice, at, number, None, 0))
                position[choice] += 1
        else:
            tokens = pb.Tokens(
                attempt=bytes([attempt]),
                choice=choice,
                position=position[choice],
                ids=range(number, number + count),
            )
            if with_logprobs:
                tokens.logprobs.extend(pb.TokenLogprob(logprob=number) for _ in range(count))
            if kind == "finish":
                tokens.finish = pb.STOP
                finished.add(choice)
            position[choice] += count
            event = RequestEvent(tokens=tokens)
            put += flatten(event)
            outbox.put(event)
    while batch := outbox.take():
        taken += [row for event in batch for row in flatten(event)]

    def of(rows: list[tuple[object, ...]], choice: int) -> list[tuple[object, ...]]:
        return [r for r in rows if r[0] != "placed" and r[1] == choice]

    for choice in position:
        assert of(taken, choice) == of(put, choice)
    assert [r for r in taken if r[0] == "placed"] == [r for r in put if r[0] == "placed"]
    assert len(taken) == len(put)


def tokens(position: int, count: int = 1, finish: pb.FinishReason = pb.LENGTH) -> RequestEvent:
    done = finish if finish != pb.LENGTH else pb.FINISH_REASON_UNSPECIFIED
    return RequestEvent(
        tokens=pb.Tokens(attempt=b"a", position=position, ids=[1] * count, finish=done)
    )


def test_a_slow_reader_costs_one_event_per_choice() -> None:
    outbox = TokensOutbox(RequestEvent)
    for position in range(MAX_MERGED_IDS):
        outbox.put(tokens(position))
    assert len(outbox) == 1
    outbox.put(tokens(MAX_MERGED_IDS))
    assert len(outbox) == 2


def test_what_was_taken_is_never_changed() -> None:
    outbox = TokensOutbox(RequestEvent)
    outbox.put(tokens(0))
    (sent,) = outbox.take()
    outbox.put(tokens(1))
    assert list(sent.tokens.ids) == [1]
    assert [e.tokens.position for e in outbox.take()] == [1]


def test_batches_stay_below_the_message_limit() -> None:
    outbox = TokensOutbox(RequestEvent)
    big = 50_000
    for number in range(20):
        text = "x" * big
        outbox.put(RequestEvent(failed=pb.Failed(epoch=number, failure=pb.Failure(message=text))))
    outbox.put(RequestEvent(failed=pb.Failed(epoch=20, failure=pb.Failure(message="x" * 400_000))))
    epochs = []
    while batch := outbox.take():
        size = sum(event.ByteSize() for event in batch)
        assert size <= MAX_BATCH_BYTES or len(batch) == 1
        epochs += [event.failed.epoch for event in batch]
    assert epochs == list(range(21))


@pytest.mark.anyio
async def test_reader_wakes_and_ends() -> None:
    outbox = TokensOutbox(RequestEvent)
    got: list[int] = []

    async def read() -> None:
        async for batch in outbox:
            got.append(sum(len(event.tokens.ids) for event in batch))

    reader = asyncio.create_task(read())
    await asyncio.sleep(0)
    outbox.put(tokens(0))
    outbox.put(tokens(1))
    await asyncio.sleep(0.01)
    outbox.put(tokens(2))
    outbox.close()
    outbox.put(tokens(3))  # too late
    await asyncio.wait_for(reader, LIMIT_S)
    assert got == [2, 1]


def test_rows_are_columns_of_one_event_and_numbers_are_used_again() -> None:
    outbox, choices = TokensOutbox(RequestEvent), NumberedChoices()
    for choice in range(3):
        assert not outbox.put_token(b"a", 2, choice, 0, 9), "it has no number yet"
        named = pb.Tokens(request="r", attempt=b"a", epoch=2, choice=choice, ids=[9])
        outbox.put(RequestEvent(tokens=named))
    for position in (1, 2):
        for choice in range(3):
            assert outbox.put_token(b"a", 2, choice, position, 10 * position + choice)
    *begun, rows = outbox.take()
    for event in begun:
        choices.note(event.tokens)
    got = [(*choice, position, id_) for choice, position, id_ in choices.of(rows.rows)]
    assert got == [("r", b"a", 2, c, p, 10 * p + c) for p in (1, 2) for c in range(3)]
    last = pb.Tokens(attempt=b"a", epoch=2, choice=1, position=3, ids=[9], finish=pb.STOP)
    outbox.put(RequestEvent(tokens=last))
    assert not outbox.put_token(b"a", 2, 1, 4, 9), "it has ended"
    assert not outbox.put_token(b"a", 3, 0, 3, 9), "of another epoch"
    outbox.put(RequestEvent(tokens=pb.Tokens(attempt=b"b", ids=[1])))
    assert [event.tokens.number for event in outbox.take()] == [0, begun[1].tokens.number]


def test_rows_do_not_overtake_what_was_put_before_them() -> None:
    outbox = TokensOutbox(RequestEvent)
    outbox.put(tokens(0))
    assert outbox.put_token(b"a", 0, 0, 1, 1)
    outbox.put(tokens(2, finish=pb.STOP))
    kinds = [event.WhichOneof("event") for event in outbox.take()]
    assert kinds == ["tokens", "rows", "tokens"]


def test_one_event_has_only_so_many_rows() -> None:
    outbox = TokensOutbox(RequestEvent)
    outbox.put(tokens(0))
    for position in range(1, 2 * MAX_ROWS + 2):
        assert outbox.put_token(b"a", 0, 0, position, 250_000)
    events = outbox.take()
    assert [len(event.rows.ids) for event in events] == [0, MAX_ROWS, MAX_ROWS, 1]
    assert max(event.ByteSize() for event in events) < 60_000


def test_a_session_has_only_so_many_numbers() -> None:
    numbers, choices = ChoiceNumbers(), NumberedChoices()
    for choice in range(MAX_NUMBERED + 2):
        named = pb.Tokens(attempt=b"a", choice=choice)
        numbers.note(named)
        assert 0 < named.number <= MAX_NUMBERED
        choices.note(named)
    assert not numbers.get(b"a", 0, 0), "the first has lost its number"
    for choice in (2, MAX_NUMBERED, MAX_NUMBERED + 1):
        rows = pb.TokenRows(numbers=[numbers.get(b"a", 0, choice)], positions=[1], ids=[5])
        ((found, _, _),) = choices.of(rows)
        assert found.choice == choice


def test_rows_with_numbers_that_nobody_said_are_left_out() -> None:
    choices = NumberedChoices()
    choices.note(pb.Tokens(attempt=b"a", number=MAX_NUMBERED + 1))
    rows = pb.TokenRows(numbers=[1, MAX_NUMBERED + 1], positions=[1, 1], ids=[5, 5])
    assert not list(choices.of(rows))
