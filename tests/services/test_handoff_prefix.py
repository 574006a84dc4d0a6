"""A lost or slow prefill leaves the blocks that decode has verified; the next try continues from
there.
"""

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import ask, fake_engine
from systems.eventually import LIMIT_S, wait_until
from systems.handoff_pair import MakePair, Pair, fresh, local, request

from pdserve.engine.api import PrefillComputed, Request
from pdserve.engine.handoff.incoming import SLOW_RATIO
from pdserve.engine.kv import KvIdentity, Mixing

BLOCK = 4
BLOCK_BYTES = 128


class Stop:
    """Blocks prefill's engine thread once decode has verified `tokens` of an attempt."""

    def __init__(self, pair: Pair, tokens: int) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._pair, self._tokens = pair, tokens
        pair.prefill_hook = self._hook

    def _hook(self, step: Any) -> None:
        """Wait after each chunk until decode has it."""
        if self.reached.is_set():
            return
        for event in step.events:
            if not isinstance(event, PrefillComputed) or event.done:
                continue
            attempt = bytes.fromhex(event.key)
            self._wait(attempt, event.num_tokens)
            if event.num_tokens >= self._tokens <= self._arrived(attempt):
                self.reached.set()
                self.go_on.wait(LIMIT_S)

    def _wait(self, attempt: bytes, num_tokens: int) -> None:
        outgoing = self._pair.sender.attempt(attempt)
        if outgoing is None or not outgoing.next_blocks:
            # This thread has to receive the permission to send, between this chunk and the next.
            with suppress(TimeoutError):
                wait_until(lambda: self._pair.sender._inbox, limit_s=1.0, pause_s=0.001)
            return
        self._pair.wait(lambda: self._arrived(attempt) >= num_tokens)

    def _arrived(self, attempt: bytes) -> int:
        incoming = self._pair.receiver.attempt(attempt)
        return 0 if incoming is None else incoming.num_verified * BLOCK


def verified(pair: Pair, attempt: bytes) -> int:
    """Return how many tokens decode has reported in its prefix cache."""
    return pair.verified.get(attempt, [(0, 0)])[-1][0]


def cut_off(pair: Pair) -> None:
    """Cut decode's connection as if prefill were killed."""
    for link in pair.sender.links:
        link.end("killed")


def lose(pair: Pair, job: Request, tokens: int) -> int:
    """Hand `job` over and cut the connection after `tokens`; return how many decode has kept."""
    stop = Stop(pair, tokens)
    attempt = pair.hand_off(job)
    assert stop.reached.wait(LIMIT_S)
    assert attempt not in pair.received, "between the first and the last frame"
    cut_off(pair)
    pair.wait(lambda: attempt in pair.lost)
    stop.go_on.set()
    pair.wait(lambda: attempt in pair.sent)
    pair.prefill_hook = lambda step: None
    return verified(pair, attempt)


@pytest.mark.parametrize("tokens", [16, 96, 160])
def test_another_prefill_sends_only_the_missing_blocks(pair: Pair, tokens: int) -> None:
    job = request(200)
    kept = lose(pair, job, tokens)
    assert tokens <= kept < 199
    pair.assert_clean()
    again = fresh(job)
    attempt = pair.hand_off(again)
    assert pair.answer(again) == local(job)
    received = pair.received[attempt]
    assert received.num_bytes == (50 - kept // BLOCK) * BLOCK_BYTES
    assert received.cached_tokens >= kept
    pair.assert_clean()


def test_decode_itself_computes_only_the_missing_tokens(pair: Pair) -> None:
    job = request(200)
    kept = lose(pair, job, 160)
    assert pair.decode_thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S) == 0
    again = fresh(job)
    pair.decode_thread.post(lambda e: e.submit(again)).result(LIMIT_S)
    assert pair.answer(again) == local(job)
    computed = pair.decode_thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S)
    assert computed == 200 - kept <= 0.25 * 200
    pair.assert_clean()


def test_repeated_losses_make_progress_with_every_try(pair: Pair) -> None:
    job = request(200)
    kept = [lose(pair, fresh(job), tokens) for tokens in (48, 96, 144)]
    assert 48 <= kept[0] < kept[1] < kept[2] < 199
    last = fresh(job)
    attempt = pair.hand_off(last)
    assert pair.answer(last) == local(job)
    assert pair.received[attempt].num_bytes == (50 - kept[2] // BLOCK) * BLOCK_BYTES
    pair.assert_clean()


def test_a_cancelled_attempt_leaves_its_prefix(pair: Pair) -> None:
    job = request(200)
    stop = Stop(pair, 96)
    attempt = pair.hand_off(job)
    assert stop.reached.wait(LIMIT_S)
    assert pair.at_decode(lambda r: r.cancel(attempt, "cancel"))
    stop.go_on.set()
    pair.wait(lambda: attempt in pair.sent)
    pair.assert_clean()
    counts = pair.decode_thread.post(lambda e: e.stats().blocks).result(LIMIT_S)
    assert counts.cached == verified(pair, attempt) // BLOCK >= 96 // BLOCK


def test_one_prompt_received_twice_concurrently(pair: Pair) -> None:
    """Of equal blocks the first is the cached one; the others are freed uncached."""
    job = request(200)
    stop = Stop(pair, 96)
    first = pair.hand_off(job)
    assert stop.reached.wait(LIMIT_S)
    twin = fresh(job)
    ticket = pair.admit(twin)
    assert ticket is not None
    stop.go_on.set()
    pair.start(twin, ticket)
    assert pair.answer(job) == pair.answer(twin) == local(job)
    assert {first, ticket.attempt} <= set(pair.received)
    pair.assert_clean()
    counts = pair.decode_thread.post(lambda e: e.stats().blocks).result(LIMIT_S)
    assert counts.cached <= 52


@pytest.mark.parametrize("window", [6, 40])
def test_a_window_model_never_finds_a_prefix_without_its_window(
    make_pair: MakePair, window: int
) -> None:
    """The window's blocks before the last tokens are not sent, so nothing before them is of use."""
    pair = make_pair(window=window)
    job = request(120)
    kept = lose(pair, job, 80)
    assert kept == 0
    again = fresh(job)
    pair.decode_thread.post(lambda e: e.submit(again)).result(LIMIT_S)
    assert pair.answer(again) == local(job, window=window)
    pair.assert_clean()


def test_a_slow_prefill_is_given_up_and_costs_only_the_missing_chunks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.engine.handoff.incoming.SLOW_S", 0.3)
    job = request(200)
    stop = Stop(pair, 96)
    attempt = pair.hand_off(job)
    assert stop.reached.wait(LIMIT_S)
    pair.wait(lambda: attempt in pair.lost)
    assert pair.lost[attempt] == "prefill slow"
    assert not stop.go_on.is_set(), "prefill was still at its chunk"
    stop.go_on.set()
    pair.wait(lambda: attempt in pair.sent)
    assert pair.sent[attempt].reason == "peer: prefill slow"
    again = fresh(job)
    pair.decode_thread.post(lambda e: e.submit(again)).result(LIMIT_S)
    assert pair.answer(again) == local(job)
    computed = pair.decode_thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S)
    assert computed == 200 - verified(pair, attempt)
    pair.assert_clean()


def test_a_prefill_that_computes_others_first_is_not_slow(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "pdserve.engine.handoff.incoming.SLOW_S"
    monkeypatch.setattr(limit, 1e6)
    job, other = request(200), request(20, seed=1)
    began = time.monotonic()
    stop = Stop(pair, 96)
    attempt = pair.hand_off(job)
    assert stop.reached.wait(LIMIT_S)
    passed, go_on = threading.Event(), threading.Event()
    submitted = pair.prefill_thread.post(lambda e: e.submit(other))
    ahead_s = time.monotonic() - began

    def hold(step: Any) -> None:
        if not passed.is_set() and submitted.done():
            go_on.wait(ahead_s)  # now the shorter prompt has the higher response ratio
        if pair.prefill_thread.passes_over(job.key) and not passed.is_set():
            passed.set()
            go_on.wait(LIMIT_S)

    pair.prefill_hook = hold
    stop.go_on.set()
    assert passed.wait(LIMIT_S), "the shorter prompt had a separate step"
    incoming = pair.receiver.attempt(attempt)
    assert incoming is not None, "before the longer one's end"
    assert incoming.slow_peer is not None
    assert incoming.slow_peer.longest is not None
    pair.wait(lambda: incoming.passed_over)
    monkeypatch.setattr(limit, 0.3)
    limit_s = max(0.3, SLOW_RATIO * incoming.slow_peer.longest)
    since = incoming.slow_peer.looked
    pair.wait(lambda: incoming.slow_peer.looked - since > 2 * limit_s)
    assert attempt not in pair.lost
    monkeypatch.setattr(limit, 1e6)
    go_on.set()
    assert pair.answer(job) == local(job)
    assert attempt in pair.received
    pair.assert_clean()


def test_several_choices_also_continue_from_the_prefix(pair: Pair) -> None:
    options = {"n": 3, "seed": 9, "temperature": 1.0}
    job = request(90, **options)
    kept = lose(pair, job, 64)
    again = fresh(job)
    pair.decode_thread.post(lambda e: e.submit(again)).result(LIMIT_S)
    assert pair.answer(again) == local(job)
    assert pair.decode_thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S) == 90 - kept
    pair.assert_clean()


def test_another_tenant_does_not_find_the_prefix(pair: Pair) -> None:
    job = request(200)
    lose(pair, job, 160)
    other = fresh(ask("", job.prompt_ids, cache_salt=b"another"))
    pair.decode_thread.post(lambda e: e.submit(other)).result(LIMIT_S)
    assert pair.answer(other) == local(job)
    assert pair.decode_thread.post(lambda e: e.stats().prompt_tokens).result(LIMIT_S) == 200


def test_a_prefix_of_another_identity_is_not_reported_as_decode_s_own(tmp_path: Path) -> None:
    """A prefill of the same identity continues from it; decode itself cannot."""
    engines = fake_engine(num_blocks=256), fake_engine(num_blocks=256)
    for engine, weights in zip(engines, ("aa", "bb"), strict=True):
        digest = weights.encode() * 8
        engine.kv_identity = KvIdentity(digest, weights, "Q4_1", "cc", "70", "float32", "native")
    pair = Pair(*engines, "tcp", tmp_path, mixing=Mixing(weights=True))
    job = request(200)
    assert lose(pair, job, 96) == 0
    assert not pair.verified
    again = fresh(job)
    attempt = pair.hand_off(again)
    assert pair.answer(again) == local(job)
    assert pair.received[attempt].num_bytes <= (50 - 24) * BLOCK_BYTES
    assert not pair.verified
    pair.assert_clean()
    pair.close()
