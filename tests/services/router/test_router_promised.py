"""Prefixes that attempts bring to decode workers, and decisions that rely on them."""

from dataclasses import replace
from random import Random

from builders.worker_kinds import kind
from hypothesis import given
from hypothesis import strategies as st

from pdserve.services.router.fleet import WorkerFacts
from pdserve.services.router.placement import PromisedChains, PromptFacts, Rules, decide
from pdserve.services.router.placement.policy import awaited_tokens

RULES = Rules(threshold=512)
PROMPT = PromptFacts(3999)


def worker(incarnation: bytes, **facts: int) -> WorkerFacts:
    return WorkerFacts(incarnation, kind(), **facts)


def test_promised_prefixes_are_counted_by_attempt() -> None:
    promised = PromisedChains()
    promised.add(b"1", b"d0", [b"a", b"b", b"c"])
    promised.add(b"2", b"d0", [b"a", b"b", b"x"])
    assert promised.num_promised([b"a", b"b", b"c", b"d"]) == {b"d0": 3}
    assert promised.num_promised([]) == {}
    promised.drop(b"1")
    promised.drop(b"1")
    assert promised.num_promised([b"a", b"b", b"c"]) == {b"d0": 2}
    promised.drop(b"2")
    assert promised.num_promised([b"a"]) == {}
    assert not set(promised)


# A link hashes all that precedes it, so it never repeats behind another one.
chains = st.text("ab", max_size=6).map(lambda ids: [ids[: i + 1].encode() for i in range(len(ids))])
moves = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([b"d0", b"d1"]), chains))


@given(moves, chains)
def test_promises_compared_with_a_plain_list(
    moves: list[tuple[int, bytes, list[bytes]]], request: list[bytes]
) -> None:
    promised = PromisedChains()
    live: dict[bytes, tuple[bytes, list[bytes]]] = {}
    for number, incarnation, chain in moves:
        attempt = bytes([number])
        if live.pop(attempt, None) is None:
            live[attempt] = incarnation, chain
            promised.add(attempt, incarnation, chain)
        else:
            promised.drop(attempt)
        assert set(promised) == set(live)
        expected = {}
        for one in (b"d0", b"d1"):
            known = {link for at, chain in live.values() if at == one for link in chain}
            count = next((i for i, link in enumerate(request) if link not in known), len(request))
            if count:
                expected[one] = count
        assert promised.num_promised(request) == expected


def test_followers_go_where_the_kv_is_going() -> None:
    decodes = [worker(b"d0", requests=3, promised_tokens=3984), worker(b"d1")]
    prefills = [worker(b"p0")]
    for seed in range(20):
        decision = decide(PROMPT, decodes, prefills, RULES, Random(seed))
        assert decision is not None
        assert (decision.decode, decision.reason) == (b"d0", "shared prefix")
        assert decision.follows
        # Decode decides: it may know better, and then this request computes the prompt.
        assert decision.prefill == b"p0"
        assert decision.cached_tokens == 0


def test_promised_prefixes_make_no_hot_spots() -> None:
    decodes = [worker(b"d0", requests=9, promised_tokens=3984), worker(b"d1")]
    decision = decide(PROMPT, decodes, [worker(b"p0")], RULES, Random(0))
    assert decision is not None
    assert (decision.decode, decision.reason) == (b"d1", "remote prefill")
    assert not decision.follows


def test_prefixes_that_are_worth_waiting_for() -> None:
    def awaited(prompt: PromptFacts = PROMPT, rules: Rules = RULES, **facts: int) -> int:
        return awaited_tokens(prompt, worker(b"d0", **facts), rules)

    assert awaited(promised_tokens=3984) == 3984
    assert awaited(promised_tokens=5000) == 3999
    assert awaited(promised_tokens=1984) == 0, "less than half of the missing part"
    assert awaited(cached_tokens=1000, promised_tokens=3000) == 3000
    assert awaited(cached_tokens=3500, promised_tokens=3984) == 3500, "too little to wait for"
    assert awaited(cached_tokens=3500, promised_tokens=16) == 3500
    always = Rules("always", 512)
    assert awaited(rules=always, cached_tokens=3500, promised_tokens=3984) == 3984
    local = replace(PROMPT, may_go_remote=False)
    assert awaited(prompt=local, promised_tokens=3984) == 0, "prompt logprobs need every token"
