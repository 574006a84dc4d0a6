"""Turns the timeline of a real run into a scenario for the cluster simulation; pure.

The simulation (tests/simulation) is another, smaller cluster with different tokens, so a scenario
imitates a run and does not repeat it. It has as many requests at the same times, with prompts of as
many blocks, up to MAX_BLOCKS. Each event that ended an attempt becomes the most similar fault of
the simulation, at the request and phase that it hit. A dying process ends several attempts, so
faults of the same kind within one second become one.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from pdserve.engine.handoff.protocol import Phase, Side
from pdserve.engine.handoff.recorder.event_log import (
    FOLLOW,
    PEER_NOTIFIED,
    ROUTE,
    Entry,
    RecordKind,
    Timeline,
    event_name,
)

BLOCK = 4  # tokens of a block in the simulation
MAX_BLOCKS = 11  # of a prompt in the simulation
MAX_PROCESSES = 2  # of one role in the simulation
MAX_TOKENS = 10
# Part of a reason -> fault; the first match is used. SILENT has the faults of silent peers.
REASONS = (
    ("cancelled", "client closes"),
    ("deadline", "deadline"),
    ("frame", "bit flip"),
    ("prefill slow", "SIGSTOP prefill"),
    ("session lost", "reset router-decode"),
    ("decode stops", "SIGTERM decode"),
    ("prefill stops", "SIGTERM prefill"),
    ("reservation", "no blocks at decode"),
    ("connection", "reset prefill-decode"),
    ("cannot reach", "reset prefill-decode"),
    ("died", "SIGKILL decode"),
)
FOLLOWS = (FOLLOW, RecordKind.OPENED)
SILENT = {Side.RECEIVE.value: "SIGSTOP prefill", Side.SEND.value: "SIGSTOP decode"}


def scenario(timeline: Timeline, attempts: Mapping[bytes, Sequence[Entry]]) -> dict[str, Any]:
    """Return the scenario of these attempts as plain values that can be written as JSON."""
    requests = _requests(attempts)
    first = min((tries[0][0].at_ns for tries in requests.values()), default=0)
    owners = _owners(requests)
    scenario_requests, faults, seen = [], [], set()
    for name, tries in requests.items():
        at_s = (tries[0][0].at_ns - first) / 1e9
        scenario_requests.append(
            _scenario_request(name, at_s, owners[name], requests[owners[name]])
        )
        for entries in tries:
            kind, end = _fault(timeline, entries)
            if kind and (kind, end.at_ns // 10**9) not in seen:
                seen.add((kind, end.at_ns // 10**9))
                phase, index = _phase(entries, end, kind)
                seed = crc32(entries[0].record.attempt)
                fault = {"kind": kind, "phase": phase, "request": name, "index": index}
                faults.append(fault | {"seed": seed})
    return {
        "seed": crc32(b"".join(attempts)),
        "asks": scenario_requests,
        "faults": faults,
        "gateways": 1,
        "routers": _processes(timeline, "router"),
        "prefills": _processes(timeline, "prefill"),
        "decodes": _processes(timeline, "decode"),
        "prefill_blocks": 48,
        "decode_blocks": 64,
        "window": 0,
    }


def _processes(timeline: Timeline, role: str) -> int:
    count = sum(recording.role == role for recording in timeline.recordings)
    return min(max(count, 1), MAX_PROCESSES)


def _requests(attempts: Mapping[bytes, Sequence[Entry]]) -> dict[str, list[Sequence[Entry]]]:
    """Group the attempts by the request that they try to serve: request name -> tries. An attempt
    that no router recorded is a separate request."""
    requests: dict[str, list[Sequence[Entry]]] = {}
    for attempt, entries in attempts.items():
        opened = [
            e for e in entries if e.record.side == ROUTE and e.record.kind is RecordKind.OPENED
        ]
        name = f"{opened[0].source}-{opened[0].record.argument}" if opened else attempt.hex()
        requests.setdefault(name, []).append(entries)
    return requests


def _owners(requests: Mapping[str, Sequence[Sequence[Entry]]]) -> dict[str, str]:
    """Map each request to the request whose prompt it shares: the one whose blocks it waited for,
    or itself."""
    names = {t[0].record.attempt[:4]: name for name, tries in requests.items() for t in tries}
    owners: dict[str, str] = {}
    for name, tries in requests.items():
        wait_entries = [e for t in tries for e in t if (e.record.side, e.record.kind) == FOLLOWS]
        leader = (
            names.get(wait_entries[0].record.argument.to_bytes(4), name) if wait_entries else name
        )
        owners[name] = owners.get(leader, leader)
    return owners


def _scenario_request(
    name: str, at_s: float, owner: str, tries: Sequence[Sequence[Entry]]
) -> dict[str, Any]:
    """Return one request of the scenario. `owner` is the request whose prompt it shares, and
    `tries` are the attempts of that owner."""
    block_counts = [e.record.detail for t in tries for e in t if e.record.kind is RecordKind.TAKEN]
    length = BLOCK * min(max([1, *block_counts]), MAX_BLOCKS)
    seed = crc32(owner.encode())
    prompt = [(seed + 7 * i + i * i) % 63 + 1 for i in range(length)]
    request: dict[str, Any] = {"name": name, "at_s": round(at_s, 6), "prompt": prompt, "seed": seed}
    return request | {"max_tokens": MAX_TOKENS, "n": 1, "timeout_s": 120.0, "gateway": 0}


def _fault(timeline: Timeline, entries: Sequence[Entry]) -> tuple[str, Entry]:
    """Return (the simulation's name of the fault that ended an attempt, the entry that shows it);
    the name is empty if no fault did."""
    for entry in entries:
        record = entry.record
        released = record.event is not None and record.after is Phase.RELEASED
        if record.side == FOLLOW or (not released and record.kind is not RecordKind.CLOSED):
            continue  # the end of a wait is no fault
        reason = timeline.of(entry).reason(record.detail & ~PEER_NOTIFIED)
        if not reason or reason == "busy":
            continue
        dead_roles = [
            role for role in ("prefill", "decode") if _died(timeline, entries, role, entry)
        ]
        if dead_roles:
            return f"SIGKILL {dead_roles[0]}", entry
        if reason in ("peer silent", "peer frozen"):
            return SILENT[record.side], entry
        return next((kind for part, kind in REASONS if part in reason), ""), entry
    return "", entries[0]


def _died(timeline: Timeline, entries: Sequence[Entry], role: str, end: Entry) -> bool:
    """Return whether another process of the attempt, with this role, recorded nothing after `end`,
    not even its own end."""
    for entry in entries:
        recording = timeline.of(entry)
        if recording.role == role and recording.records[-1].kind is not RecordKind.END:
            last = max(e.at_ns for e in timeline.entries if e.source == entry.source)
            if last <= end.at_ns and end.source != entry.source:
                return True
    return False


def _phase(entries: Sequence[Entry], end: Entry, kind: str) -> tuple[str, int]:
    """Return (the simulation's name of the phase in which the fault hit the attempt, index of the
    frame or token in that phase)."""
    names = [event_name(e.record) for e in entries if e.at_ns <= end.at_ns]
    sides = {(e.record.side, event_name(e.record)) for e in entries if e.at_ns <= end.at_ns}
    frames = names.count("sent")
    if kind == "bit flip" or (frames and "handed" not in names):
        return "transferring", min(max(0, frames - 1), 2)
    if "handed" in names or (Side.SEND.value, "opened") not in sides:
        return "decoding", 1
    return ("claimed", 0) if "picked" in names else ("queued", 0)
