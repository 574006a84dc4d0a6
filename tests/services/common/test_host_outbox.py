"""At any pace of the reader, ids keep their order per choice, and messages stay small."""

import asyncio
from collections import defaultdict
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from systems.eventually import LIMIT_S

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import Placed, RequestEvent
from pdserve.services.common.rpc import NumberedChoice, RowReader, TokensOutbox
from pdserve.services.common.rpc import outbox as outbox_module
from pdserve.services.common.rpc.outbox import MAX_BATCH_BYTES, MAX_MERGED_IDS, MAX_NAMED, MAX_ROWS

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
    outbox = in_rows()
    position = {0: 0, 1: 0, 2: 0}
    finished: set[int] = set()
    attempt = 0
    put: list[tuple[object, ...]] = []  # one entry per id, in order
    taken: list[tuple[object, ...]] = []
    reader = RowReader()

    def flatten(event: RequestEvent) -> list[tuple[object, ...]]:
        if event.WhichOneof("event") == "placed":
            return [("placed", event.placed.epoch)]
        if event.WhichOneof("event") == "rows":
            return [
                (choice.attempt, choice.choice, at, token, None, 0)
                for choice, at, token in reader.read(event.rows)
            ]
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
        elif choice in finished:
            continue
        elif kind == "row":
            at = position[choice]
            assert outbox.put_token(NumberedChoice("", bytes([attempt]), 0, choice), at, number)
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
    outbox = in_rows()
    for position in range(MAX_MERGED_IDS):
        outbox.put(tokens(position))
    assert len(outbox) == 1
    outbox.put(tokens(MAX_MERGED_IDS))
    assert len(outbox) == 2


def test_taken_events_are_never_changed() -> None:
    outbox = in_rows()
    outbox.put(tokens(0))
    (sent,) = outbox.take()
    outbox.put(tokens(1))
    assert list(sent.tokens.ids) == [1]
    assert [e.tokens.position for e in outbox.take()] == [1]


def test_batches_stay_below_the_message_limit() -> None:
    outbox = in_rows()
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
    outbox = in_rows()
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


def in_rows() -> TokensOutbox[RequestEvent]:
    outbox = TokensOutbox(RequestEvent)
    outbox.reads_rows = True
    return outbox


A = NumberedChoice("r", b"a", 2, 0)


def test_rows_are_columns_of_one_event() -> None:
    outbox, reader = in_rows(), RowReader()
    put = [
        (A._replace(choice=c), position, 10 * position + c) for position in (1, 2) for c in (0, 1)
    ]
    for row in put:
        assert outbox.put_token(*row)
    (event,) = outbox.take()
    assert list(reader.read(event.rows)) == put
    assert len(event.rows.named) == 2
    assert outbox.put_token(A, 3, 30)
    (event,) = outbox.take()
    assert not event.rows.named, "the choice has its number"
    assert list(reader.read(event.rows)) == [(A, 3, 30)]


def test_a_receiver_that_reads_no_rows_gets_none() -> None:
    outbox = TokensOutbox(RequestEvent)
    assert not outbox.put_token(A, 1, 7)
    assert not len(outbox)


def test_rows_do_not_overtake_earlier_events() -> None:
    outbox = in_rows()
    outbox.put(tokens(0))
    assert outbox.put_token(A, 1, 1)
    outbox.put(tokens(2, finish=pb.STOP))
    kinds = [event.WhichOneof("event") for event in outbox.take()]
    assert kinds == ["tokens", "rows", "tokens"]


def test_rows_and_names_in_one_event_are_bounded() -> None:
    outbox, reader = in_rows(), RowReader()
    for position in range(2 * MAX_ROWS + 1):
        assert outbox.put_token(A, position, 250_000)
    events = outbox.take()
    assert [len(event.rows.ids) for event in events] == [MAX_ROWS, MAX_ROWS, 1]
    longest = NumberedChoice("r" * 256, b"a" * 16, 1 << 40, 0)
    for choice in range(2 * MAX_NAMED + 1):
        assert outbox.put_token(longest._replace(choice=choice), 1, 250_000)
    named = outbox.take()
    assert [len(event.rows.named) for event in named] == [MAX_NAMED, MAX_NAMED, 1]
    assert max(event.ByteSize() for event in (*events, *named)) < 90_000
    assert sum(1 for event in (*events, *named) for _ in reader.read(event.rows)) == (
        2 * MAX_ROWS + 1 + 2 * MAX_NAMED + 1
    )


def test_rows_with_unknown_numbers_are_ignored() -> None:
    rows = pb.TokenRows(numbers=[1], positions=[1], ids=[5])
    assert not list(RowReader().read(rows))


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 40]))
def test_each_choice_has_its_own_tokens_over_two_hops(seed: int, most: int) -> None:
    """Two workers' outboxes, a router's, and the gateway: rows, Tokens, merges in backlogs, ends
    and cancels at random, with numbers for only `most` choices.
    """
    random = Random(seed)
    with patch.object(outbox_module, "MAX_NUMBERED", most):
        workers = [in_rows(), in_rows()]
        readers, at_gateway = [RowReader(), RowReader()], RowReader()
        router = in_rows()
        said: dict[NumberedChoice, list[int]] = {}
        live: list[tuple[int, NumberedChoice]] = []
        got: dict[NumberedChoice, list[int]] = defaultdict(list)

        def pass_on(event: RequestEvent, reader: RowReader, put: Any) -> None:
            if event.HasField("rows"):
                for choice, position, id_ in reader.read(event.rows):
                    put(choice, position, [id_], None)
            else:
                one = event.tokens
                choice = NumberedChoice(one.request, one.attempt, one.epoch, one.choice)
                put(choice, one.position, list(one.ids), one)

        def to_router(choice: NumberedChoice, position: int, ids: list[int], one: Any) -> None:
            if one is None and position and random.random() < 0.9:
                router.put_token(choice, position, ids[0])
            else:
                whole = one or pb.Tokens(**choice._asdict(), position=position, ids=ids)
                router.put(RequestEvent(tokens=whole))

        def to_client(choice: NumberedChoice, position: int, ids: list[int], one: Any) -> None:
            assert position == len(got[choice])
            got[choice] += ids

        for _ in range(120):
            what = random.random()
            if what < 0.15 or not live:
                choice = NumberedChoice(f"r{len(said)}", b"%d" % len(said), 0, 0)
                said[choice] = []
                live.append((random.randrange(2), choice))
            elif what < 0.8:
                at = random.randrange(len(live))
                worker, choice = live[at]
                ids, kind = said[choice], random.random()
                id_ = 1000 * len(said) + len(ids)
                if kind < 0.75:
                    workers[worker].put_token(choice, len(ids), id_)
                else:
                    one = pb.Tokens(**choice._asdict(), position=len(ids), ids=[id_])
                    if kind > 0.9:
                        one.finish = pb.STOP
                        live.pop(at)
                    workers[worker].put(RequestEvent(tokens=one))
                ids.append(id_)
            elif what < 0.83:
                live.pop(random.randrange(len(live)))  # cancelled: no end is sent
            elif what < 0.93:
                number = random.randrange(2)
                for event in workers[number].take():
                    pass_on(event, readers[number], to_router)
            else:
                for event in router.take():
                    pass_on(event, at_gateway, to_client)
        for number in range(2):
            for event in workers[number].take():
                pass_on(event, readers[number], to_router)
        for event in router.take():
            pass_on(event, at_gateway, to_client)
        assert {choice: got[choice] for choice in said} == said
        assert len(at_gateway) <= most
