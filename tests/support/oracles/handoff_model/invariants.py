"""Conditions of every state, and of the end of every path.

Other conditions are checked where they apply: a write into a block of another attempt, a wrong
value in the batch, a second answer, a block or a promise returned twice.
"""

from oracles.handoff_model.memory import BLOCK_SIZE
from oracles.handoff_model.rules import Violation
from oracles.handoff_model.state import World
from pdserve.engine.handoff.incoming import promise_blocks


def check_state(w: World) -> None:
    """Check that no block is cached before it was verified, and that promises belong to live
    attempts.
    """
    model, decode = w.model, w.decode
    for chain_hash, block in w.decode_blocks().pool._by_hash.items():
        if decode.values[block - 1] != model.values.of_hash[chain_hash]:
            raise Violation(f"block {block} is cached with {decode.values[block - 1]} in it")
    promised = 0
    jobs = w.decode_blocks().jobs.by_key
    for a in w.present:
        it = w.attempt(a)
        served = model.handoffs.live[it.receive] or it.evicted or str(a) in jobs
        if model.live_lease(it.lease) and not served:
            raise Violation("decode serves an attempt of which it has nothing")
        if model.handoffs.promised[it.receive]:
            num_tokens = len(model.config.prompts[model.request_of(a)])
            promised += min(promise_blocks(num_tokens, 1, BLOCK_SIZE), model.config.blocks)
    if promised != decode.promised:
        raise Violation(f"{decode.promised} blocks are promised, {promised} of live attempts")


def check_end(w: World) -> None:
    """Check a state without moves, except perhaps a fault: every client has an answer, and no
    attempt has a block.

    While a process is frozen the others must have released everything.
    """
    frozen = [w.decode.frozen, *(w.prefill(p).frozen for p in range(w.model.config.prefills))]
    if not w.decode.frozen:
        if not w.decode_blocks().idle:
            raise Violation("decode holds blocks for no attempt")
        if w.decode.promised:
            raise Violation("a promise was never given back")
        live = [a for a in w.present if w.model.live_lease(w.attempt(a).lease)]
        if live:
            raise Violation("decode serves an attempt without a client")
        for r in range(len(w.model.config.prompts)):
            req = w.request(r)
            if not req.answer and not any(frozen):
                raise Violation(f"request {r} is never answered")
            if req.answer and not w.ended(r):
                raise Violation(f"request {r} was answered and goes on")
    for p in range(w.model.config.prefills):
        if not w.prefill(p).frozen and not w.prefill_blocks(p).idle:
            raise Violation(f"prefill worker {p} holds blocks for no attempt")
