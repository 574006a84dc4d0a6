"""Invariants that must hold after every run, whatever faults struck. The result is a list of
violations, empty if all hold.

Every request has one terminal answer, complete or a typed error, and a stream is a prefix of the
stream of a run without faults. After the death of a router no prompt token is computed again. Every
block is back; nothing is promised, reserved or remembered; each request is counted once; no service
has logged an error; and the processes' records of their hand-offs conform to the state machine
(engine/handoff/recorder/conform.py).
"""

from collections import Counter
from typing import Any

from pdserve.engine.handoff.recorder import check
from pdserve.services.router.fleet.fleet import MIN_ISOLATED
from simulation.cluster import Cluster, Node, Reply
from simulation.faults import MAY_FAIL, NOTHING_AGAIN, Faults
from simulation.model import reference
from simulation.scenario import DEAF, Ask

BOUND_S = 8.0  # after the last answer and the last fault: park and orphan times are 5 s


def expected(cluster: Cluster, ask: Ask) -> dict[int, list[int]]:
    """Return the ids of each choice in a run without faults."""
    prompt = list(ask.prompt)
    return {c: reference(cluster.spec, prompt, ask.seed, c, ask.max_tokens) for c in range(ask.n)}


def violations(cluster: Cluster, faults: Faults) -> list[str]:
    """Return all violations as text."""
    found = [v for reply in cluster.replies.values() for v in _of_reply(cluster, faults, reply)]
    found += leftovers(cluster)
    found += _computed_again(cluster, faults)
    found += _of_metrics(cluster, faults)
    notes = [life.recording() for life in cluster.world.notes]
    found += [f"the trace of attempt {str(v)[8:]}" for v in check(notes)]
    found += [f"error in {e}" for e in cluster.world.errors]
    return found


def _of_reply(cluster: Cluster, faults: Faults, reply: Reply) -> list[str]:
    name = reply.ask.name
    found = [f"{name}: {t}" for t in reply.trouble]
    wanted = expected(cluster, reply.ask)
    for choice, ids in reply.ids.items():
        if ids != wanted.get(choice, [])[: len(ids)]:
            found.append(f"{name}: choice {choice} is {ids}, not {wanted.get(choice)}")
    if reply.left or reply.broken:
        return found
    if len(reply.terminal) != 1:
        return [*found, f"{name}: {len(reply.terminal)} terminal answers"]
    code = reply.terminal[0]
    if code == "finished":
        if reply.ids != wanted or not all(reply.finish.get(c) for c in wanted):
            found.append(f"{name}: finished with {reply.ids}, not {wanted}")
    elif not _may_fail(cluster, faults, reply, code):
        found.append(f"{name}: {code} ({reply.message})")
    return found


def _may_fail(cluster: Cluster, faults: Faults, reply: Reply, code: str) -> bool:
    request = reply.ask.name
    kinds = {s.fault.kind for s in faults.strikes if s.fault.request == request}
    if len(faults.strikes) > 1:  # together they may exceed what a request survives
        return True
    return bool(kinds & set(MAY_FAIL)) and code in ("DEADLINE_EXCEEDED", "CANCELLED")


def leftovers(cluster: Cluster) -> list[str]:
    """Return what is still held, by process."""
    found: list[str] = []
    for node in cluster.nodes.values():
        if node.process.alive and node.process.service is not None:
            held = _held(node)
            found += [f"{node.name} holds {what}: {n}" for what, n in held.items() if n]
    return found


def _held(node: Node) -> dict[str, Any]:
    service = node.process.service
    if node.role == "gateway":
        return {"requests": len(service._inboxes)}
    if node.role == "router":
        dispatcher = service.core.dispatcher
        return {
            "requests": dispatcher.num_running,
            "queued": dispatcher.num_queued,
            "attempts": len(dispatcher.attempts),
            "promised chains": len(set(dispatcher.placer.promised)),
        }
    part = service.runtime
    if part is None:
        return {}
    stats = part.engine.stats()
    blocks = stats.blocks
    held = {
        "requests in the engine": stats.running + stats.waiting + stats.held + stats.reserved,
        "jobs": len(part.engine.jobs.by_key),
        "used blocks": blocks.used,
        "reserved blocks": blocks.reserved,
        "blocks without an owner": blocks.total
        - blocks.free
        - blocks.cached
        - blocks.used
        - blocks.reserved,
    }
    for number, pool in enumerate(part.engine.jobs.tables.pools):
        counts = pool.counts()
        held[f"blocks of group {number}"] = counts.total - counts.free - counts.cached
    if node.role == "decode":
        held["hand-offs"] = part.receiver.num_live
        held["promises"] = part.promised_tokens
        held["served"] = service.core.num_served
        held["followers"] = part.single_flight.num_waiting
        held["leaders"] = part.single_flight.num_leaders
    else:
        held["hand-offs"] = part.sender.num_live
        held["attempts"] = service.core.num_attempts
    return held


def at_rest(cluster: Cluster) -> bool:
    return not leftovers(cluster)


def _computed_again(cluster: Cluster, faults: Faults) -> list[str]:
    """Check that no prompt token except the last was computed twice, after faults that take nothing
    from a worker. The check is skipped after a preemption, which recomputes a request in any case,
    and after a router with too few workers to detect that it is isolated declared them dead."""
    kinds = {strike.fault.kind for strike in faults.strikes}
    num_workers = len(cluster.of("prefill")) + len(cluster.of("decode"))
    if DEAF in kinds and num_workers < MIN_ISOLATED:
        return []
    roles = [n.process.service for n in cluster.of("decode")]
    parts = [role.runtime for role in roles if role is not None and role.runtime is not None]
    preempted = any(part.engine.stats().preemptions for part in parts)
    if not kinds or kinds - set(NOTHING_AGAIN) or preempted:
        return []
    again: Counter[str] = Counter()
    for (request, position), times in faults.watch.computed.items():
        if position < len(cluster.replies[request].ask.prompt) - 1:
            again[request] += times - 1
    return [f"{name}: {n} prompt tokens computed again" for name, n in again.items() if n]


def _of_metrics(cluster: Cluster, faults: Faults) -> list[str]:
    """Check that the router counted each request once, if a single router lived through the whole
    run."""
    touched = any("router" in s.fault.kind or "gateway" in s.fault.kind for s in faults.strikes)
    lives = {node.lives for node in cluster.of("router")}
    if touched or lives != {1}:
        return []
    outcomes: Counter[str] = Counter()
    prefills: Counter[str] = Counter()
    for node in cluster.of("router"):
        dispatcher = node.process.service.core.dispatcher
        outcomes += dispatcher.outcomes
        prefills += dispatcher.prefills
    requests = [r for r in cluster.replies.values() if r.requested_at]
    finished = sum(r.terminal == ["finished"] for r in requests)
    found = []
    if outcomes.total() != len(requests):
        found.append(f"{len(requests)} requests, counted as {dict(outcomes)}")
    if not finished <= prefills.total() <= len(requests):
        found.append(f"{finished} of {len(requests)} requests finished, prefills {dict(prefills)}")
    return found
