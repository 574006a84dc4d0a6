"""The routing policy as properties: compatible pairs, the threshold, balance, no hot spots."""

from dataclasses import replace
from random import Random

from builders.worker_kinds import kind
from hypothesis import event, given
from hypothesis import strategies as st

from pdserve.services.router.fleet import WorkerFacts, mismatch
from pdserve.services.router.placement import PromptFacts, Rules, decide, decode_costs
from pdserve.services.router.placement.policy import (
    AGAIN_RATIO,
    BUSIER_RATIO,
    BUSIER_REQUESTS,
    HANDOFF_TOKENS,
    ROW_TOKENS,
    SPREAD_TOKENS,
    WORK_RATIO,
    computed_again,
    local_cost,
    max_balanced_requests,
    pays,
    power_of_two,
    queue_cost,
    spread,
)

A = kind()
incarnations = st.binary(min_size=16, max_size=16)
workers = st.builds(
    WorkerFacts,
    incarnation=incarnations,
    kind=st.builds(
        kind,
        digest=st.sampled_from([b"a", b"b"]),
        wire_version=st.sampled_from([1, 2]),
        transports=st.sampled_from([("tcp",), ("shm", "tcp"), ("shm",), ()]),
    ),
    requests=st.integers(0, 100),
    waiting_tokens=st.integers(0, 100_000),
    cached_tokens=st.integers(0, 5_000),
)
fleets = st.lists(workers, max_size=6, unique_by=lambda w: w.incarnation)
prompts = st.builds(
    PromptFacts,
    num_tokens=st.integers(0, 5_000),
    may_go_remote=st.booleans(),
    prefill_failures=st.integers(0, 3),
)
rules = st.builds(
    Rules,
    remote_prefill=st.sampled_from(["auto", "always", "never"]),
    threshold=st.integers(1, 2_000),
)


@given(prompts, fleets, fleets, rules, st.integers())
def test_a_decision_is_possible_and_follows_the_rules(
    prompt: PromptFacts,
    decodes: list[WorkerFacts],
    prefills: list[WorkerFacts],
    rules: Rules,
    seed: int,
) -> None:
    decision = decide(prompt, decodes, prefills, rules, Random(seed))
    assert decision == decide(prompt, decodes, prefills, rules, Random(seed))
    if decision is None:
        assert not decodes
        return
    decode = next(w for w in decodes if w.incarnation == decision.decode)
    missing = max(0, prompt.num_tokens - decode.cached_tokens)
    assert decision.cached_tokens == prompt.num_tokens - missing
    fit = [
        p
        for p in prefills
        if mismatch(p.kind, decode.kind, rules.mixing) is None
        and pays(prompt, missing, p, decode, rules)
    ]
    if prompt.prefill_failures:
        fit = [p for p in fit if computed_again(prompt, p, missing) <= prompt.num_tokens / 4]
    wanted = (
        missing > 0
        and prompt.may_go_remote
        and prompt.prefill_failures < 2
        and rules.remote_prefill != "never"
    )
    assert (decision.prefill is not None) == (wanted and bool(fit)), decision.reason
    if decision.prefill is not None:
        assert decision.prefill in {p.incarnation for p in fit}


@given(prompts, st.lists(workers, min_size=1, max_size=6), st.integers())
def test_failed_prefill_workers_are_not_tried_again(
    prompt: PromptFacts, prefills: list[WorkerFacts], seed: int
) -> None:
    failed = replace(prompt, failed_prefills=frozenset(p.incarnation for p in prefills[1:]))
    decode = WorkerFacts(b"d" * 16, replace(A, transports=("tcp", "shm")))
    decision = decide(failed, [decode], prefills, Rules("always"), Random(seed))
    assert decision is not None
    assert decision.prefill not in failed.failed_prefills


@given(fleets.filter(bool), st.integers(0, 5000), st.integers())
def test_the_choice_is_close_to_the_best(fleet: list[WorkerFacts], tokens: int, seed: int) -> None:
    prompt = PromptFacts(tokens)
    costs = decode_costs(prompt, fleet, max_balanced_requests(fleet))
    chosen = power_of_two(fleet, costs, queue_cost, Random(seed))
    assert chosen is not None
    least = min(costs)
    best = fleet[costs.index(least)]
    event(f"the best: {fleet[chosen] is best}")
    cost = costs[chosen]
    if cost > least:
        assert fleet[chosen].cached_tokens >= best.cached_tokens
        assert cost <= least + spread(queue_cost(best))


def test_a_worker_with_the_prefix_beats_one_without() -> None:
    """The costs differ by less than the spread within which equals are drawn, but a small part of
    the prompt would be computed again.
    """
    warm = WorkerFacts(b"w" * 16, A, requests=20, cached_tokens=50)
    cold = WorkerFacts(b"c" * 16, A, requests=19)
    prompt = PromptFacts(500)
    costs = decode_costs(prompt, [warm, cold], max_requests=20)
    assert costs[0] < costs[1] < costs[0] + spread(queue_cost(warm))
    assert all(power_of_two([warm, cold], costs, queue_cost, Random(s)) == 0 for s in range(20))


def test_at_most_the_prompt_counts_as_cached() -> None:
    """A worker that has verified more of a longer prefix is no better."""
    full, more = (WorkerFacts(bytes([n]) * 16, A, cached_tokens=n) for n in (100, 200))
    assert decode_costs(PromptFacts(100), [full, more], max_requests=9) == [0, 0]


def test_the_length_of_a_cold_prompt_does_not_hide_a_queue() -> None:
    """Work that every worker would have to do does not affect the choice of an idle one."""
    idle = WorkerFacts(b"i" * 16, A)
    queue = WorkerFacts(b"q" * 16, A, waiting_tokens=2 * SPREAD_TOKENS)
    for seed in range(20):
        decision = decide(PromptFacts(50_000), [queue, idle], [], Rules(), Random(seed))
        assert decision is not None
        assert decision.decode == idle.incarnation


def chosen_of(warm: WorkerFacts, cold: WorkerFacts, num_tokens: int) -> set[bytes]:
    """Return all workers that such a prompt may go to, over several seeds."""
    found = [
        decide(PromptFacts(num_tokens), [cold, warm], [], Rules(), Random(s)) for s in range(9)
    ]
    return {decision.decode for decision in found if decision is not None}


@given(st.integers(100, 20_000), st.integers(1, 20_000))
def test_a_worker_with_the_prefix_is_worth_its_queue(cached: int, rest: int) -> None:
    """Computing the prefix again would delay others too: it counts WORK_RATIO times."""
    cold = WorkerFacts(b"c" * 16, A)
    worth = WORK_RATIO * cached - ROW_TOKENS
    for waiting, incarnation in ((worth - 1, b"w" * 16), (worth + 1, cold.incarnation)):
        warm = WorkerFacts(b"w" * 16, A, 1, waiting_tokens=waiting, cached_tokens=cached)
        assert chosen_of(warm, cold, cached + rest) == {incarnation}


@given(st.integers(5, 40), st.integers(0, 60))
def test_an_idle_worker_does_not_discredit_the_caches_of_others(others: int, requests: int) -> None:
    """If it did, a worker that has just joined would make every other one count as too busy for
    its own cache.
    """
    fleet = [WorkerFacts(bytes([n]) * 16, A, requests) for n in range(1, others + 1)]
    newcomer = WorkerFacts(b"n" * 16, A)
    assert max_balanced_requests([newcomer, *fleet]) >= max(w.requests for w in fleet)
    hot = WorkerFacts(b"h" * 16, A, requests=2 * requests + BUSIER_REQUESTS + 1)
    assert max_balanced_requests([newcomer, hot, *fleet]) < hot.requests


def test_two_candidates_are_drawn_among_equals() -> None:
    fleet = [WorkerFacts(bytes([i]) * 16, A, requests=i) for i in range(4)]
    drawn = [power_of_two(fleet, [10] * 4, queue_cost, Random(seed)) for seed in range(400)]
    counts = {w.requests: drawn.count(at) for at, w in enumerate(fleet)}
    # P(the less loaded of two is i): 3/6, 2/6, 1/6, 0.
    assert counts[3] == 0
    assert counts[0] > counts[1] > counts[2] > 0


def test_a_cached_prefix_attracts_a_request() -> None:
    cold = WorkerFacts(b"c" * 16, A)
    warm = WorkerFacts(b"w" * 16, A, requests=2, cached_tokens=900)
    decision = decide(PromptFacts(1000), [cold, warm], [], Rules(), Random(0))
    assert decision is not None
    assert (decision.decode, decision.cached_tokens) == (warm.incarnation, 900)


@given(st.integers(2, 6), st.integers(1, 200), st.integers(100, 100_000), st.integers())
def test_a_hot_prefix_makes_no_hot_spot(
    num_workers: int, num_requests: int, prompt_len: int, seed: int
) -> None:
    """Requests never end, and all share one prefix that a single worker has."""
    rng = Random(seed)
    fleet = {bytes([i]) * 16: WorkerFacts(bytes([i]) * 16, A) for i in range(num_workers)}
    hot = next(iter(fleet))
    fleet[hot] = replace(fleet[hot], cached_tokens=prompt_len)
    for _ in range(num_requests):
        decision = decide(PromptFacts(prompt_len), list(fleet.values()), [], Rules("never"), rng)
        assert decision is not None
        chosen = fleet[decision.decode]
        fleet[decision.decode] = replace(chosen, requests=chosen.requests + 1)
    loads = sorted(w.requests for w in fleet.values())
    quarter = loads[(len(loads) - 1) // 4]  # the idlest of up to four
    assert max(loads) <= quarter * BUSIER_RATIO + BUSIER_REQUESTS + 2


def test_a_fully_cached_prompt_is_local_for_any_option() -> None:
    decode = WorkerFacts(b"d" * 16, A, cached_tokens=640)
    prefill = WorkerFacts(b"p" * 16, A)
    for tokens in (0, 600, 640):
        decision = decide(PromptFacts(tokens), [decode], [prefill], Rules("always"), Random(0))
        assert decision is not None
        assert (decision.prefill, decision.reason) == (None, "nothing to prefill")


DECODE = WorkerFacts(b"d" * 16, A)
PREFILL = WorkerFacts(b"p" * 16, A)


def where(missing: int, streams: int, prefill: WorkerFacts = PREFILL) -> str:
    """Return the reason for the placement of a prompt below the threshold."""
    decode = replace(DECODE, requests=streams)
    decision = decide(PromptFacts(missing), [decode], [prefill], Rules(), Random(0))
    assert decision is not None
    return decision.reason


def test_a_short_prompt_stays_where_it_delays_no_stream() -> None:
    assert where(128, streams=0) == "short prompt"
    assert where(16, streams=32) == "short prompt", "a hand-off would cost the streams more"


def test_a_short_prompt_goes_remote_where_it_would_delay_streams() -> None:
    assert where(128, streams=8) == "remote prefill"
    long_one = replace(PREFILL, requests=1, waiting_tokens=4_000)
    assert where(128, streams=8, prefill=long_one) == "remote prefill", "it comes first there"
    crowd = replace(PREFILL, requests=10, waiting_tokens=1_280)
    assert where(128, streams=8, prefill=crowd) == "short prompt", "prefill has enough to do"


@given(st.integers(1, 511), st.integers(0, 64), workers, rules)
def test_more_streams_never_keep_a_prompt_at_decode(
    missing: int, streams: int, prefill: WorkerFacts, rules: Rules
) -> None:
    """Beyond the cost of a hand-off to them, more streams only favor it."""
    prompt = PromptFacts(missing)
    few, more = (replace(DECODE, requests=n) for n in (streams, streams + 1))
    if missing > HANDOFF_TOKENS and pays(prompt, missing, prefill, few, rules):
        event("pays")
        assert pays(prompt, missing, prefill, more, rules)
    assert local_cost(missing, more) > local_cost(missing, few)


def after_failure(
    num_tokens: int, verified: int, cached: int, rules: str = "auto"
) -> tuple[str, int]:
    """Return where a prompt continues whose prefill failed, and how many tokens are computed
    there.
    """
    prompt = PromptFacts(num_tokens, prefill_failures=1, failed_prefills=frozenset([b"f" * 16]))
    decode = replace(DECODE, cached_tokens=verified)
    prefill = replace(PREFILL, cached_tokens=cached)
    decision = decide(prompt, [decode], [prefill], Rules(rules), Random(0))
    assert decision is not None
    if decision.prefill is None:
        return decision.reason, num_tokens - verified
    return decision.reason, num_tokens - cached


@given(
    num_tokens=st.integers(1, 8_000),
    verified=st.floats(0, 1),
    cached=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    rules=st.sampled_from(["auto", "always"]),
)
def test_a_failed_prefill_costs_at_most_a_quarter_more(
    num_tokens: int, verified: float, cached: float, rules: str
) -> None:
    """This holds for every point of failure; blocks that decode has verified are not computed
    again.
    """
    kept = int(verified * num_tokens)
    reason, computed = after_failure(num_tokens, kept, int(cached * num_tokens), rules)
    event(reason)
    assert computed - (num_tokens - kept) <= AGAIN_RATIO * num_tokens


def test_the_mean_cost_of_a_failed_prefill() -> None:
    """A kill at 80 % costs the missing fifth; the mean over all points is that of the missing part
    plus a thirtieth of the prompt.
    """
    reason, computed = after_failure(4_000, 3_200, 0)
    assert (reason, computed) == ("decode goes on", 800)
    again = []
    for kept in range(0, 4_000, 16):
        _, computed = after_failure(4_000, kept, 0)
        again.append(computed - (4_000 - kept))
    assert 0 < max(again) <= 1_000
    assert sum(again) / len(again) <= 4_000 / 30


def test_another_prefill_that_has_the_prefix_continues() -> None:
    assert after_failure(4_000, 2_000, 0)[0] == "decode goes on"
    assert after_failure(4_000, 2_000, 1_500) == ("remote prefill", 2_500)
    assert after_failure(4_000, 2_000, 3_000) == ("remote prefill", 1_000)
    assert after_failure(4_000, 3_600, 3_600)[0] == "short prompt", "the missing part is short"
    assert after_failure(4_000, 500, 0) == ("remote prefill", 4_000), "little was lost"


def test_the_decode_worker_that_has_the_blocks_is_chosen_again() -> None:
    kept = replace(DECODE, cached_tokens=1_000, requests=3)
    idle = replace(DECODE, incarnation=b"e" * 16)
    for seed in range(20):
        prompt = PromptFacts(4_000, prefill_failures=1)
        decision = decide(prompt, [idle, kept], [], Rules(), Random(seed))
        assert decision is not None
        assert decision.decode == kept.incarnation
    busy = replace(kept, requests=40)
    decision = decide(PromptFacts(4_000, prefill_failures=1), [idle, busy], [], Rules(), Random(0))
    assert decision is not None
    assert decision.decode == idle.incarnation, "not at any price"
