"""Requests of the decode service that end early: cancel, deadlines, lost hand-offs and sessions."""

from collections.abc import Callable

import pytest
from llguidance import LLMatcher
from systems.worker_kit import (
    Pair,
    prompt,
)

from pdserve.engine.constraints.grammars import CompiledGrammar, GrammarBackend, GrammarTimeout
from pdserve.protos import common_pb2 as pb
from pdserve.protos import worker_pb2 as wire

STEP_S = 0.1  # of a slow model


@pytest.mark.parametrize("remote", [True, False])
def test_cancel_frees_within_a_step(with_pair: Callable[..., None], remote: bool) -> None:
    async def test(pair: Pair) -> None:
        params = {"max_tokens": 150}
        if remote:
            attempt = await pair.hand_off(prompt(50), params=params)
        else:
            attempt = pair.admit(prompt(50), remote=False, params=params)
        await pair.decode.wait("tokens", attempt)
        pair.decode.send(wire.DecodeCommand(cancel=wire.CancelAttempt(attempt=attempt)))
        await pair.at_rest()
        assert pair.decode_role.core.num_served == 0
        assert "finished" not in pair.decode.kinds(attempt)
        assert sum(map(len, pair.decode.tokens(attempt).values())) < 150

    with_pair(test)


def test_cancel_of_a_single_choice(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        params = {"n": 2, "temperature": 1.0, "max_tokens": 100}
        attempt = pair.admit(prompt(50), remote=False, params=params)
        await pair.decode.wait("tokens", attempt)
        cancel = wire.CancelAttempt(attempt=attempt, choices=[0])
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        await pair.decode.wait("finished", attempt)
        found = pair.decode.tokens(attempt)
        assert len(found[0]) < 100 == len(found[1])
        assert any(
            m.finish == pb.ABORTED and m.choice == 0 for k, m in pair.decode.events if k == "tokens"
        )
        await pair.at_rest()

    with_pair(test)


def test_a_deadline_ends_a_request(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        remote = pair.admit(prompt(50), remaining_ms=200)  # no prefill starts
        failed = await pair.decode.wait("failed", remote)
        assert failed.failure.code == pb.DEADLINE_EXCEEDED
        assert pair.decode.kinds(remote) == ["admitted", "failed"]
        await pair.at_rest()

    with_pair(test)


def test_the_queue_timeout_counts_only_while_a_request_waits(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        waits = pair.admit(prompt(50), queue_remaining_ms=150)  # no prefill starts
        failed = await pair.decode.wait("failed", waits)
        assert failed.failure.code == pb.QUEUE_TIMEOUT
        runs = await pair.hand_off(prompt(50), queue_remaining_ms=2000)
        await pair.decode.wait("finished", runs)
        await pair.at_rest()

    with_pair(test)


class BusyCompiler(GrammarBackend):
    def load(self) -> None:
        """Need no tokenizer."""

    def _compile(self, source: str) -> CompiledGrammar:
        raise GrammarTimeout("the grammar could not be checked in time")


def test_a_grammar_that_a_busy_machine_does_not_compile_may_be_sent_again(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        grammar = pb.Grammar(source=LLMatcher.grammar_from_regex("a"))
        attempt = pair.admit(prompt(30), remote=False, params={"grammar": grammar})
        failure = (await pair.decode.wait("failed", attempt)).failure
        assert (failure.code, failure.retry_after_ms) == (pb.UNAVAILABLE, 1000)
        assert failure.message == "the grammar could not be checked in time; try again later"
        await pair.at_rest()

    with_pair(test, engine={"grammars": BusyCompiler(b"", 64, (63,))})


def test_a_lost_hand_off_is_reported(with_pair: Callable[..., None]) -> None:
    async def test(pair: Pair) -> None:
        attempt = pair.admit(prompt(60))
        admitted = await pair.decode.wait("admitted", attempt)
        pair.start_prefill(attempt, prompt(30), admitted.ticket)  # not the promised ids
        lost = await pair.decode.wait("handoff_lost", attempt)
        assert lost.reason == "the Claim names 30 tokens instead of 59"
        failed = await pair.prefill.wait("failed", attempt)
        assert failed.failure.code == pb.UNAVAILABLE
        await pair.at_rest()

    with_pair(test)


def test_an_unknown_resume_is_gone_and_unknown_cancels_are_counted(
    with_pair: Callable[..., None],
) -> None:
    async def test(pair: Pair) -> None:
        pair.decode.send(wire.DecodeCommand(resume=wire.Resume(attempt=b"x" * 16, epoch=9)))
        await pair.decode.wait("gone", b"x" * 16)
        cancel = wire.CancelAttempt(attempt=b"y" * 16)
        pair.decode.send(wire.DecodeCommand(cancel=cancel))
        attempt = pair.admit(prompt(9), remote=False)
        await pair.decode.wait("finished", attempt)
        assert pair.decode_role.core.num_stale == 1

    with_pair(test)
