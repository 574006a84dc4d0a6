"""A running request continues on another engine with its KV, or stays where it was."""

import threading
from dataclasses import replace
from typing import Any

import pytest
from systems.eventually import LIMIT_S
from systems.handoff_pair import MakePair, Pair, claims_of, fresh, local, request

from pdserve.engine.api import ChoiceState, NewTokens, Request, Step
from pdserve.engine.handoff.outgoing import Sent
from pdserve.engine.handoff.protocol import Ticket
from pdserve.engine.transport.base import transports
from pdserve.services.decode.runtime import OutgoingMigrations


class Source:
    """The pair's first engine as a decode worker, with OutgoingMigrations over its sender."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.said: list[int] = []
        self.moves: list[tuple[bytes, Sent]] = []
        self.migrations = OutgoingMigrations(pair.prefill, pair.sender, self._ended)
        pair.prefill_hook = self._step
        on_ended = pair.sender._on_ended

        def ended(sent: Sent) -> None:
            self.migrations.ended(sent)
            on_ended(sent)

        pair.sender._on_ended = ended

    def _step(self, step: Step) -> None:
        for event in step.events:
            if isinstance(event, NewTokens):
                self.said += event.ids

    def _ended(self, attempt: bytes, sent: Sent) -> None:
        self.moves.append((attempt, sent))

    def run(self, job: Request, count: int) -> None:
        """Run until the request has `count` ids, then hold it."""
        self.requests = job
        self.pair.prefill_thread.post(lambda engine: engine.submit(job))
        self.pair.wait(lambda: len(self.said) >= count)
        self.attempt = bytes.fromhex(job.key)
        held = self.do(lambda d: d.freeze(self.attempt))
        assert held is not None
        assert held.num_tokens == len(job.prompt_ids) + len(self.said) - 1

    def do(self, act: Any) -> Any:
        return self.pair.prefill_thread.post(lambda _: act(self.migrations)).result(LIMIT_S)

    def admit(self) -> tuple[Request, Ticket]:
        """Admit the rest of the request at the other side."""
        rest = replace(fresh(self.requests), choices=(ChoiceState(tuple(self.said)),))
        ticket = self.pair.admit(rest)
        assert ticket is not None
        return rest, ticket

    def send(self, ticket: Ticket) -> None:
        address = self.pair.addresses.get("tcp", "")
        digest = self.pair.receiver.identity.digest
        assert self.do(lambda d: d.send(self.attempt, ticket, address, digest))


def slow_down(pair: Pair) -> None:
    """Slow the source's steps down, so that a request has not ended when it moves."""
    forward = pair.prefill.model.forward

    def slow(batch: Any, kv: Any) -> Any:
        threading.Event().wait(0.002)
        return forward(batch, kv)

    pair.prefill.model.forward = slow  # type: ignore[method-assign]


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"min_tokens": 50, "top_k": 20, "temperature": 2},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "penalty_window": 9},
]
LENGTHS = [1, 3, 4, 30]
# A transport carries blocks, whatever samples the tokens: every prompt length goes over each
# transport, and with all parameters over one.
MOVES = [("tcp", length, params) for length in LENGTHS for params in PARAMS] + [
    (transport, length, PARAMS[number % len(PARAMS)])
    for transport in transports()
    if transport != "tcp"
    for number, length in enumerate(LENGTHS)
]


@pytest.mark.parametrize(("transport", "length", "params"), MOVES)
def test_a_moved_request_gives_the_tokens_of_an_unmoved_one(
    make_pair: MakePair, transport: str, length: int, params: dict[str, Any]
) -> None:
    """Nothing is computed twice, and the last block is moved though it is not full."""
    pair = make_pair(transport)
    slow_down(pair)
    job = request(length, max_tokens=60, **params)
    source = Source(pair)
    source.run(job, 6)
    said = len(source.said)
    assert said < 60, "the request ended too soon"
    rest, ticket = source.admit()
    source.send(ticket)
    found = pair.answer(rest)[0]
    assert source.said + found == local(job)[0]
    pair.wait(lambda: bool(source.moves))
    ((attempt, sent),) = source.moves
    assert (attempt, sent.reason) == (source.attempt, "")
    blocks = -(-(length + said - 1) // 4)
    assert sent.num_bytes == blocks * 128
    stats = pair.decode.stats()
    assert (stats.prompt_tokens, stats.recomputed_tokens) == (int(length + said == 1), 0)
    assert len(source.said) == said, "the source made no step"
    assert (source.migrations.num_gone, source.migrations.num_stayed) == (1, 0)
    pair.assert_clean()


def test_only_blocks_that_the_other_side_lacks_are_sent(make_pair: MakePair) -> None:
    pair = make_pair()
    slow_down(pair)
    job = request(40, max_tokens=60)
    pair.hand_off(fresh(replace(job, params=replace(job.params, max_tokens=1))))
    pair.wait(lambda: bool(pair.finished))
    pair.at_prefill(lambda s: None)
    source = Source(pair)
    source.run(job, 6)
    rest, ticket = source.admit()
    source.send(ticket)
    assert source.said + pair.answer(rest)[0] == local(job)[0]
    pair.wait(lambda: bool(source.moves))
    blocks = -(-(40 + len(source.said) - 1) // 4)
    assert source.moves[0][1].num_bytes <= (blocks - 9) * 128, "nine blocks were there"
    pair.assert_clean()


@pytest.mark.parametrize("window", [6, 16])
def test_window_layers_move_their_last_window(make_pair: MakePair, window: int) -> None:
    pair = make_pair(window=window)
    slow_down(pair)
    job = request(40, max_tokens=60)
    source = Source(pair)
    source.run(job, 6)
    rest, ticket = source.admit()
    source.send(ticket)
    assert source.said + pair.answer(rest)[0] == local(job, window=window)[0]
    pair.assert_clean()


@pytest.mark.parametrize("how", ["before", "refused", "cancelled there", "it stays", "no answer"])
def test_after_any_failure_a_request_continues_where_it_was(
    make_pair: MakePair, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 3.0 if how == "no answer" else 1e6  # enough for the claim to come on a busy machine
    monkeypatch.setattr("pdserve.services.decode.runtime.MIGRATION_S", limit_s)
    pair = make_pair()
    slow_down(pair)
    job = request(40, max_tokens=60)
    source = Source(pair)
    source.run(job, 6)
    rest, ticket = source.admit()
    if how in ("cancelled there", "it stays", "no answer"):  # its claim is not granted
        pair.decode_thread.post(lambda e: setattr(e, "reserve", lambda *a: None)).result(LIMIT_S)
    if how == "before":
        assert source.do(lambda d: d.unfreeze(source.attempt))
        assert not source.do(lambda d: d.send(source.attempt, ticket, "", b""))
        pair.at_decode(lambda r: r.cancel(ticket.attempt, "test"))
    elif how == "refused":
        pair.at_decode(lambda r: r.cancel(ticket.attempt, "test"))
        source.send(ticket)
    else:
        source.send(ticket)
        pair.wait(lambda: bool(claims_of(pair.receiver)))
        if how == "cancelled there":
            pair.at_decode(lambda r: r.cancel(ticket.attempt, "test"))
        elif how == "it stays":
            assert source.do(lambda d: d.unfreeze(source.attempt))
    pair.wait(lambda: len(source.said) == 60)
    assert source.said == local(job)[0]
    assert not source.do(lambda d: d.unfreeze(source.attempt)), "it is not held any more"
    assert (source.migrations.num_gone, source.migrations.num_stayed) == (0, 1)
    pair.wait(lambda: ticket.attempt in pair.lost or how in ("before",))
    reasons = [sent.reason for _, sent in source.moves]
    assert bool(reasons) == (how not in ("before", "it stays")), "the failed move is reported"
    if how == "no answer":
        assert reasons == ["deadline"]
    pair.assert_clean()
    assert pair.prefill.stats().recomputed_tokens == 0
    assert rest.key not in pair.tokens
