"""Whatever the pace of the reader, ids and their order per choice stay, and messages stay small."""

import asyncio

import pytest
from eventually import LIMIT_S
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import Placed, RequestEvent
from pdserve.services.host.rpc.outbox import MAX_BATCH_BYTES, MAX_MERGED_IDS, Outbox

steps = st.lists(
    st.tuples(
        st.sampled_from(["tokens", "tokens", "tokens", "placed", "take", "finish", "retry"]),
        st.integers(0, 2),
        st.integers(1, 5),
        st.booleans(),
    ),
    max_size=60,
)


@given(steps)
def test_merging_changes_no_content_and_no_order(steps: list[tuple[str, int, int, bool]]) -> None:
    outbox: Outbox[RequestEvent] = Outbox()
    position = {0: 0, 1: 0, 2: 0}
    finished: set[int] = set()
    attempt = 0
    put: list[tuple[object, ...]] = []  # one entry per id, in order
    taken: list[tuple[object, ...]] = []

    def flatten(event: RequestEvent) -> list[tuple[object, ...]]:
        if event.WhichOneof("event") == "placed":
            return [("placed", event.placed.epoch)]
        tokens = event.tokens
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
        elif choice not in finished:
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
    outbox: Outbox[RequestEvent] = Outbox()
    for position in range(MAX_MERGED_IDS):
        outbox.put(tokens(position))
    assert len(outbox) == 1
    outbox.put(tokens(MAX_MERGED_IDS))
    assert len(outbox) == 2


def test_what_was_taken_is_never_changed() -> None:
    outbox: Outbox[RequestEvent] = Outbox()
    outbox.put(tokens(0))
    (sent,) = outbox.take()
    outbox.put(tokens(1))
    assert list(sent.tokens.ids) == [1]
    assert [e.tokens.position for e in outbox.take()] == [1]


def test_batches_stay_below_the_message_limit() -> None:
    outbox: Outbox[RequestEvent] = Outbox()
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
    outbox: Outbox[RequestEvent] = Outbox()
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
