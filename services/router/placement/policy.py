"""Placement policy: chooses a decode worker for a prompt, and a prefill worker if that pays
(Decision). Pure: randomness is an argument.

A cost is a number of tokens to compute before the request's first token. Tokens of the request's
own prompt count WORK_RATIO times as much as tokens queued before it: a queue delays this request
only, but recomputing what another worker has cached delays all requests behind it, and the
recomputed KV evicts another prefix from a cache.

A long prompt always goes to a prefill worker. A short one goes there only if that costs less than
computing it at the decode worker (`remote_cost`, `local_cost`). In these two costs, the delay of
the streams that the decode worker runs counts as much as the wait of the request itself, because
each prompt token that decode computes delays every one of them.

After a failed prefill, the blocks that decode had verified remain in its cache. The cost of a
decode worker takes them into account, so the same worker is chosen again unless it is much busier.
The rest of the prompt is computed where least is recomputed: at another prefill worker if it would
recompute at most a quarter of the prompt (AGAIN_RATIO) that decode has, otherwise at decode. So a
prefill that fails at any point costs at most that quarter again, and decode computes a long rest
only if every prefill worker would have to recompute a long beginning.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from random import Random

from pdserve.engine.kv import NO_MIXING, Difference, Mixing
from pdserve.services.router.fleet import WorkerFacts, mismatch

# A running row delays a new request about as much as this many prompt tokens.
ROW_TOKENS = 64
# A token to compute counts as much as this many queued before it. A higher ratio brings few more
# hits and longer queues (docs/scale.md).
WORK_RATIO = 12
# Workers that have as much of the prompt as the best are as good if their queue is longer by at
# most this part of the best's queue, or SPREAD_TOKENS. Of two drawn at random the less loaded wins:
# a load report is up to 50 ms old (its free blocks up to 100) and lacks other routers' commands, so
# without the draw all routers would choose the same worker.
SPREAD_RATIO = 0.5
SPREAD_TOKENS = 256
# A worker this much busier than the idlest quarter of workers gets no credit for its cache: no hot
# spots.
BUSIER_RATIO = 1.5
BUSIER_REQUESTS = 4
# Part of a prompt that may be computed again after a failed prefill.
AGAIN_RATIO = 0.25
# Cost of a hand-off (claim, frames, commit) to decode and to each of its streams.
HANDOFF_TOKENS = 32
# A prefill worker finishes its current chunk before it turns to a shorter prompt.
CHUNK_TOKENS = 128
SAME_WEIGHTS = Mixing(numerics=True)


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Facts about one request that the placement policy decides by: prompt length, and prefills
    that have failed."""

    num_tokens: int  # prefix ids less the last: their KV must exist before the first decode row
    may_go_remote: bool = True  # prompt logprobs keep a request local
    prefill_failures: int = 0
    failed_prefills: frozenset[bytes] = frozenset()  # incarnations


@dataclass(frozen=True, slots=True)
class Rules:
    """The operator's settings of the placement policy: when a prefill worker computes a prompt, and
    which workers may be combined."""

    remote_prefill: str = "auto"  # auto, always, never
    threshold: int = 512
    max_prefill_failures: int = 2
    mixing: Mixing = NO_MIXING  # of a prefill and a decode worker
    resuming: Mixing = SAME_WEIGHTS  # used when no worker can continue exactly

    @property
    def min_shared_tokens(self) -> int:
        """Minimum number of tokens of another prompt's KV for which a request waits instead of
        computing them; equal to the number that is worth a hand-off."""
        return 1 if self.remote_prefill == "always" else self.threshold


Refused = tuple[bytes, Difference]  # incarnation of a prefill worker, and the reason


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of the placement policy: the chosen decode and prefill workers (incarnations), and the
    reason."""

    decode: bytes
    prefill: bytes | None  # None: decode computes the prompt itself, if it does not wait
    reason: str
    cached_tokens: int  # expected at decode
    refused: tuple[Refused, ...] = ()  # incompatible prefill workers, with reasons
    follows: bool = False  # decode is expected to wait for the KV of another prompt


def decide(
    prompt: PromptFacts,
    decodes: Sequence[WorkerFacts],
    prefills: Sequence[WorkerFacts],
    rules: Rules,
    rng: Random,
) -> Decision | None:
    """Choose the decode worker for a prompt, and a prefill worker if that pays. Returns None if
    there are no decode workers."""
    sharing = [
        w if w.promised_tokens <= w.cached_tokens else with_awaited(prompt, w, rules)
        for w in decodes
    ]
    index = pick_decode(prompt, sharing, rng)
    if index is None:
        return None
    decode, picked = decodes[index], sharing[index]
    missing = missing_tokens(prompt, decode)
    # A request that shares another's KV gets a prefill worker too, in case the sharing fails.
    prefill, reason, refused = pick_prefill(prompt, decode, missing, prefills, rules, rng)
    incarnation = None if prefill is None else prefill.incarnation
    follows = picked.cached_tokens > decode.cached_tokens
    reason = "shared prefix" if follows else reason
    return Decision(
        decode.incarnation, incarnation, reason, prompt.num_tokens - missing, refused, follows
    )


def missing_tokens(prompt: PromptFacts, worker: WorkerFacts) -> int:
    """Return how many of the prompt's tokens the worker has not cached."""
    return max(0, prompt.num_tokens - worker.cached_tokens)


def with_awaited(prompt: PromptFacts, worker: WorkerFacts, rules: Rules) -> WorkerFacts:
    """Return the worker's facts with KV that is in transfer counted as cached, if waiting for it
    pays."""
    return worker.of_prompt(awaited_tokens(prompt, worker, rules), worker.promised_tokens)


def awaited_tokens(prompt: PromptFacts, worker: WorkerFacts, rules: Rules) -> int:
    """Return how many of the prompt's tokens the worker need not compute: cached ones, and those in
    transfer for other prompts if waiting for them pays by decode's rule
    (decode/single_flight.py)."""
    shared = min(worker.promised_tokens, prompt.num_tokens) - worker.cached_tokens
    enough = shared >= max(rules.min_shared_tokens, worker.kind.layout.block_size)
    waits = enough and prompt.may_go_remote and 2 * shared >= missing_tokens(prompt, worker)
    return worker.cached_tokens + (shared if waits else 0)


def decode_costs(
    prompt: PromptFacts, workers: Sequence[WorkerFacts], max_requests: float
) -> list[int]:
    """Return the cost of a prompt at each decode worker, in the order of `workers`. Cached tokens
    reduce the cost, except at a worker with more than `max_requests` requests."""
    # Inlines queue_cost and missing_tokens, since it runs for each worker and request.
    full_cost = WORK_RATIO * prompt.num_tokens
    costs = [w.waiting_tokens + ROW_TOKENS * w.requests + full_cost for w in workers]
    for index, w in enumerate(workers):
        if w.cached_tokens and w.requests <= max_requests:
            costs[index] -= WORK_RATIO * min(w.cached_tokens, prompt.num_tokens)
    return costs


def prefill_cost(prompt: PromptFacts, worker: WorkerFacts, credit: bool) -> int:
    """Return the cost of a prompt at a prefill worker: the worker's queue, and the tokens of the
    prompt that it must compute. Cached tokens reduce the cost only if `credit` is set."""
    missing = missing_tokens(prompt, worker) if credit else prompt.num_tokens
    return waiting_tokens(worker) + WORK_RATIO * missing


def queue_cost(worker: WorkerFacts) -> int:
    """Return the cost of the work at a decode worker before a new request: waiting prompt tokens
    and running requests."""
    return worker.waiting_tokens + ROW_TOKENS * worker.requests


def waiting_tokens(worker: WorkerFacts) -> int:
    """Return the cost of the work at a prefill worker before a new request: its waiting prompt
    tokens only, because it generates no tokens."""
    return worker.waiting_tokens


def computed_again(prompt: PromptFacts, prefill: WorkerFacts, missing: int) -> int:
    """Return how many tokens of the prompt the prefill worker would compute although decode has
    them. `missing`: number of the prompt's tokens that decode lacks."""
    return max(0, missing_tokens(prompt, prefill) - missing)


def local_cost(missing: int, decode: WorkerFacts) -> int:
    """Return the cost if the decode worker computes the `missing` tokens of the prompt: this
    request and all requests that run at the worker wait for them."""
    return missing * (1 + decode.requests)


def remote_cost(prompt: PromptFacts, prefill: WorkerFacts, decode: WorkerFacts) -> int:
    """Return the cost if the prefill worker computes the prompt: its queue, the tokens that it must
    compute, and the hand-off, which delays the streams of the decode worker. The queue counts up to
    a bound, because a prefill worker computes its shortest prompt first."""
    new_tokens = missing_tokens(prompt, prefill)
    queue = min(prefill.waiting_tokens, CHUNK_TOKENS + prefill.requests * new_tokens)
    return queue + new_tokens + HANDOFF_TOKENS * (1 + decode.requests)


def pays(
    prompt: PromptFacts, missing: int, prefill: WorkerFacts, decode: WorkerFacts, rules: Rules
) -> bool:
    """Return whether the prefill worker should compute the `missing` tokens of the prompt and hand
    the KV over, instead of the decode worker computing them."""
    if rules.remote_prefill == "always" or missing >= rules.threshold:
        return True
    return remote_cost(prompt, prefill, decode) < local_cost(missing, decode)


def pick_decode(prompt: PromptFacts, workers: Sequence[WorkerFacts], rng: Random) -> int | None:
    """Return the position in `workers` of the decode worker chosen for the prompt: the less loaded
    of two drawn among the cheapest. Returns None without workers."""
    costs = decode_costs(prompt, workers, max_balanced_requests(workers))
    return power_of_two(workers, costs, queue_cost, rng)


def pick_prefill(
    prompt: PromptFacts,
    decode: WorkerFacts,
    missing: int,
    workers: Sequence[WorkerFacts],
    rules: Rules,
    rng: Random,
) -> tuple[WorkerFacts | None, str, tuple[Refused, ...]]:
    """Choose a prefill worker for a prompt of which the decode worker lacks `missing` tokens.
    Returns the prefill worker (None: decode computes the tokens), the reason, and the prefill
    workers whose KV the decode worker cannot use."""
    if missing == 0:
        return None, "nothing to prefill", ()
    if rules.remote_prefill == "never":
        return None, "remote prefill is off", ()
    if not prompt.may_go_remote:
        return None, "prompt logprobs", ()
    short = rules.remote_prefill == "auto" and missing < rules.threshold
    candidates = (
        [w for w in workers if pays(prompt, missing, w, decode, rules)] if short else workers
    )
    if short and not candidates:
        return None, "short prompt", ()
    if prompt.prefill_failures >= rules.max_prefill_failures:
        return None, "prefill failed too often", ()
    compatible: list[WorkerFacts] = []
    incompatible: list[Refused] = []
    for worker in candidates:
        reason = mismatch(worker.kind, decode.kind, rules.mixing)
        if reason is not None:
            incompatible.append((worker.incarnation, reason))
        elif worker.incarnation not in prompt.failed_prefills:
            compatible.append(worker)
    refused = tuple(incompatible)
    if not compatible:
        all_refused = 0 < len(refused) == len(candidates)
        return None, "no compatible prefill worker" if all_refused else "no prefill worker", refused
    if prompt.prefill_failures:
        max_recomputed = AGAIN_RATIO * prompt.num_tokens
        compatible = [w for w in compatible if computed_again(prompt, w, missing) <= max_recomputed]
        if not compatible:
            return None, "decode goes on", refused
    max_requests = max_balanced_requests(compatible)
    costs = [prefill_cost(prompt, w, w.requests <= max_requests) for w in compatible]
    index = power_of_two(compatible, costs, waiting_tokens, rng)
    assert index is not None  # `compatible` is not empty
    return compatible[index], "remote prefill", refused


def max_balanced_requests(workers: Collection[WorkerFacts]) -> float:
    """Return the largest number of requests with which a worker still counts as not much busier
    than the others; a busier one gets no credit for its cache. The comparison is with the idlest
    quarter of the workers (of up to four workers: the idlest one), because a single worker that has
    just joined or become idle says nothing about the others."""
    if not workers:
        return 0.0
    requests = sorted([w.requests for w in workers])
    return requests[(len(requests) - 1) // 4] * BUSIER_RATIO + BUSIER_REQUESTS


def power_of_two(
    workers: Sequence[WorkerFacts],
    costs: Sequence[int],
    queue_of: Callable[[WorkerFacts], int],
    rng: Random,
) -> int | None:
    """Return the position in `workers` of the less loaded of two workers, drawn at random among
    those about as cheap as the cheapest (power of two choices; Mitzenmacher, 2001). Returns None
    without workers. `queue_of`: returns the queued part of a worker's cost."""
    if not workers:
        return None
    min_cost = min(costs)
    best = workers[costs.index(min_cost)]
    max_cost = min_cost + spread(queue_of(best))
    near_best = [
        i
        for i, cost in enumerate(costs)
        if cost <= max_cost and (cost == min_cost or workers[i].cached_tokens >= best.cached_tokens)
    ]
    sampled = rng.sample(near_best, min(2, len(near_best)))
    return min(sampled, key=lambda i: (workers[i].requests, costs[i]))


def spread(queue: int) -> float:
    """Return by how much the cost of a worker may exceed the lowest cost so that the worker still
    counts as equally good. `queue`: the queued part of the lowest cost."""
    return max(SPREAD_RATIO * queue, SPREAD_TOKENS)
