"""The decode side of a hand-off: one engine computes the KV, and another continues from its
bytes."""

from itertools import product

import pytest
from builders.engine_kit import ask, assert_at_rest, fake_engine, of, run, tokens
from fakes.decoder import fake_spec, reference

from pdserve.engine.api import (
    ChoiceState,
    ContextLengthExceeded,
    Finished,
    FinishReason,
    InvalidRequest,
    Request,
    Scheduled,
    prefix_ids,
)
from pdserve.engine.engine import Engine
from pdserve.engine.scheduling import Reservation

WINDOWS = (0, 6)  # layers with full attention; and those combined with window layers


def hand_off(prefill: Engine, reservation: Reservation, decode: Engine, request: Request) -> int:
    """Compute the prefix without its last token on `prefill` and copy the requested blocks.

    Returns the number of copied blocks.
    """
    ids = prefix_ids(request)[:-1]
    sent = 0
    if ids and any(
        first < len(blocks)
        for first, blocks in zip(reservation.first_block, reservation.blocks, strict=True)
    ):
        run(prefill, ask(request.key, ids, prefill_only=True))
        for group, held in enumerate(prefill.held_blocks(request.key)):
            first, targets = reservation.first_block[group], reservation.blocks[group]
            sources = held[first : len(targets)]
            assert all(sources), "prefill has released blocks that decode requests"
            layers = range(len(prefill.kv.spec.groups[group].layers))
            payload = b"".join(prefill.kv.read(group, layers, sources))
            decode.kv.write(group, layers, targets[first:], memoryview(payload))
            sent += len(sources)
        prefill.release_held(request.key)
    return sent


def remote(prefill: Engine, decode: Engine, request: Request) -> tuple[dict, Reservation, int]:
    reservation = decode.reserve(request)
    assert reservation is not None
    sent = hand_off(prefill, reservation, decode, request)
    decode.commit(reservation)
    return tokens(run(decode)), reservation, sent


def test_a_hand_off_gives_the_same_tokens_as_local_prefill(subtests: pytest.Subtests) -> None:
    for window, length in product(WINDOWS, (1, 2, 4, 5, 16, 17, 33, 36)):
        with subtests.test(window=window, length=length):
            prefill, decode = fake_engine(window=window), fake_engine(window=window)
            prompt = [(7 * i) % 60 for i in range(length)]
            got, reservation, sent = remote(prefill, decode, ask("a", prompt))
            assert got["a", 0] == reference(prompt, fake_spec(4, window), 8)
            assert reservation.num_tokens == length - 1
            assert (sent > 0) == (length > 1)
            # The last prompt token is an ordinary decode row.
            assert decode.stats().prompt_tokens == 1
            # The second time, decode has the prompt in its cache.
            got, reservation, sent = remote(prefill, decode, ask("a", prompt))
            assert got["a", 0] == reference(prompt, fake_spec(4, window), 8)
            assert reservation.cached_tokens >= (length - 1) // 4 * 4
            assert sent <= len(decode.kv.spec.groups)
            assert_at_rest(decode)
            assert_at_rest(prefill)


def test_choices_and_resumes(subtests: pytest.Subtests) -> None:
    for window in WINDOWS:
        with subtests.test(window=window):
            options = {"n": 3, "seed": 9, "temperature": 1.0}
            local = tokens(run(fake_engine(window=window), ask("a", range(14), **options)))
            prefill, decode = fake_engine(window=window), fake_engine(window=window)
            got, _, _ = remote(prefill, decode, ask("a", range(14), **options))
            assert got == local
            cut = tuple(ChoiceState(tuple(local["a", c][: 2 * c])) for c in range(3))
            got, _, _ = remote(
                fake_engine(window=window),
                fake_engine(window=window),
                ask("a", range(14), choices=cut, **options),
            )
            assert got == {("a", c): local["a", c][2 * c :] for c in range(3)}
            one = tuple(
                ChoiceState(tuple(local["a", c][:5]), None if c == 1 else FinishReason.STOP)
                for c in range(3)
            )
            got, reservation, _ = remote(
                fake_engine(window=window),
                fake_engine(window=window),
                ask("a", range(14), choices=one, **options),
            )
            assert reservation.num_tokens == 14 + 5 - 1
            assert got == {("a", 1): local["a", 1][5:]}


def test_reserved_blocks_are_counted_and_returned() -> None:
    engine = fake_engine(num_blocks=10)
    reservation = engine.reserve(ask("a", range(13)))
    assert reservation is not None
    stats = engine.stats()
    assert (stats.blocks.reserved, stats.reserved, stats.blocks.used) == (4, 1, 0)
    assert [len(b) for b in reservation.blocks] == [3]
    assert not engine.has_work
    engine.release(reservation)
    with pytest.raises(ValueError, match="is released"):
        engine.release(reservation)
    with pytest.raises(ValueError, match="is released"):
        engine.commit(reservation)
    assert_at_rest(engine)


def test_an_abort_closes_the_reservation() -> None:
    engine = fake_engine()
    reservation = engine.reserve(ask("a", range(13), n=2))
    assert reservation is not None
    engine.abort("a", [0])
    assert reservation.open
    engine.abort("a", [1])
    assert not reservation.open
    assert_at_rest(engine)
    engine.release(reservation)  # the holder may not know that it is closed
    with pytest.raises(ValueError, match="is aborted"):
        engine.commit(reservation)
    assert len(of(run(engine), Finished)) == 1


def test_an_aborted_choice_of_a_reservation_does_not_start() -> None:
    options = {"n": 2, "seed": 9, "temperature": 1.0}
    local = tokens(run(fake_engine(), ask("a", range(14), **options)))
    prefill, decode = fake_engine(), fake_engine()
    request = ask("a", range(14), **options)
    reservation = decode.reserve(request)
    assert reservation is not None
    decode.abort("a", [0])
    hand_off(prefill, reservation, decode, request)
    decode.commit(reservation)
    assert tokens(run(decode)) == {("a", 0): [], ("a", 1): local["a", 1]}
    assert_at_rest(decode)


def test_a_reservation_returns_none_if_blocks_are_short_and_raises_if_it_never_fits() -> None:
    engine = fake_engine(num_blocks=6)
    first = engine.reserve(ask("a", range(16), max_tokens=1))
    assert first is not None
    assert engine.reserve(ask("b", range(16), max_tokens=1)) is None
    engine.release(first)
    second = engine.reserve(ask("b", range(16), max_tokens=1))
    assert second is not None
    engine.release(second)
    with pytest.raises(ContextLengthExceeded):
        engine.reserve(ask("c", range(30)))
    with pytest.raises(InvalidRequest):
        engine.reserve(ask("c", range(5), prompt_logprobs=1))
    assert_at_rest(engine)


def test_unfilled_window_blocks_do_not_enter_the_cache() -> None:
    prefill, decode = fake_engine(window=6), fake_engine(window=6)
    prompt = [(7 * i) % 60 for i in range(33)]
    remote(prefill, decode, ask("a", prompt))
    # A prompt that ends where the window had passed when the KV arrived finds no blocks to read.
    for length in (9, 17, 25, 29):
        got = tokens(run(decode, ask("b", prompt[:length])))
        assert got["b", 0] == reference(prompt[:length], fake_spec(4, 6), 8)


def test_a_committed_request_waits_for_a_place_and_can_be_preempted() -> None:
    prefill = fake_engine()
    decode = fake_engine(num_blocks=12, max_running=1, prefix_cache=False)
    decode.submit(ask("old", range(4), max_tokens=40))
    decode.step()
    request = ask("new", range(9), max_tokens=8)
    reservation = decode.reserve(request)
    assert reservation is not None
    hand_off(prefill, reservation, decode, request)
    decode.commit(reservation)
    step = decode.step()
    assert step is not None
    assert not of(step.events, Scheduled)
    events = run(decode)
    assert decode.stats().preemptions == 1  # the older request took its blocks
    assert tokens(events)["new", 0] == reference(list(range(9)), fake_spec(), 8)
    assert_at_rest(decode)


def test_a_queued_request_waits_for_blocks_of_committed_ones() -> None:
    """Younger requests that hold blocks already run, although the older one cannot start."""
    prefill, decode = fake_engine(), fake_engine(num_blocks=9, prefix_cache=False)
    decode.submit(ask("old", [0], n=3))
    requests = [ask("b", [0]), ask("c", range(21))]
    reserved = [decode.reserve(request) for request in requests]
    for reservation, request in zip(reserved, requests, strict=True):
        assert reservation is not None
        hand_off(prefill, reservation, decode, request)
        decode.commit(reservation)
    events = run(decode)
    assert [e.key for e in of(events, Finished)] == ["b", "c", "old"]
    assert_at_rest(decode)


def test_reservations_do_not_starve_the_queue() -> None:
    engine = fake_engine(num_blocks=9, prefix_cache=False)
    held = engine.reserve(ask("a", range(16)))
    assert held is not None
    engine.submit(ask("b", range(24), max_tokens=1))
    assert engine.step() is None
    assert engine.reserve(ask("c", range(4))) is None  # although it would fit
    engine.release(held)
    assert len(of(run(engine), Finished)) == 1
    assert engine.reserve(ask("c", range(4))) is not None


def test_the_queue_does_not_starve_a_waiting_reservation() -> None:
    """Short prompts keep arriving; those that arrived after the claim wait for it."""
    engine = fake_engine(num_blocks=9, prefix_cache=False)
    engine.submit(ask("old", range(16), max_tokens=12))
    engine.step()
    claim = ask("claim", range(24), max_tokens=1)
    reservation, finished = None, list[str]()
    for turn in range(60):
        reservation = engine.reserve(claim)
        if reservation is not None:
            break
        engine.submit(ask(f"young{turn}", [turn], max_tokens=8))
        step = engine.step()
        finished += [] if step is None else [e.key for e in of(step.events, Finished)]
    assert reservation is not None
    assert finished == ["old"]
    engine.release(reservation)
    assert len(of(run(engine), Finished)) == turn
    assert_at_rest(engine)


def test_an_older_request_does_not_wait_for_a_reservation() -> None:
    engine = fake_engine(num_blocks=9, prefix_cache=False)
    held = engine.reserve(ask("a", range(12)))
    assert held is not None
    engine.submit(ask("older", range(8), max_tokens=1))
    assert engine.reserve(ask("claim", range(32), max_tokens=1)) is None
    assert len(of(run(engine), Finished, "older")) == 1
    engine.release(held)
    assert_at_rest(engine)


def test_an_abandoned_reservation_delays_no_other_request() -> None:
    engine = fake_engine(num_blocks=9, prefix_cache=False)
    held = engine.reserve(ask("a", range(12)))
    assert held is not None
    assert engine.reserve(ask("claim", range(32), max_tokens=1)) is None
    engine.submit(ask("young", range(4), max_tokens=1))
    assert engine.step() is None
    assert len(of(run(engine), Finished, "young")) == 1
    engine.release(held)
