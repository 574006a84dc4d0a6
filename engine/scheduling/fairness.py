"""Fairness between tenants: which tenant comes next, and what a step owes to the requests that the
previous step passed over. Pure.

A *share* is the limit of one tenant in one step, in decode rows and in prompt tokens, while several
tenants are active. A step may leave these debts to later steps:

  +----------+------------------------------------+---------------------------------+--------------+
  | debt     | what happened: recorded by         | effect on the next step         | ended by     |
  | -------- | ---------------------------------- | ------------------------------- | ------------ |
  | left out | decode rows of a tenant, from a    | the tenant's rows begin with    | begin_rows   |
  |          | rank on, exceed its share:         | these, or the tenant gives way  |              |
  |          | leave_out                          |                                 |              |
  | gave way | a tenant with rows left out gets   | no tenant gives way again       | begin_rows   |
  |          | no row, so that another tenant's   |                                 |              |
  |          | first prompt runs: begin_rows      |                                 |              |
  | kept out | a tenant gets no chunk, because    | the first chunk of every tenant | begin_chunks |
  |          | its first exceeds its share:       | runs, whatever its size         |              |
  |          | keep_out                           |                                 |              |
  | short    | a queued request lacks blocks:     | reservations for requests       | end_chunks   |
  |          | end_chunks                         | behind it wait until no queued  |              |
  |          |                                    | request lacks blocks            |              |
  | refused  | a reservation is refused: refuse   | queued requests behind it get   | end_chunks   |
  |          |                                    | no blocks                       |              |
  +----------+------------------------------------+---------------------------------+--------------+

Only the methods of Fairness write the fields of these debts, and only the Scheduler calls them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pdserve.engine.scheduling.request_state import RequestState

T = TypeVar("T")

MAX_PASSED = 8  # steps in a row that pass over a waiting tenant before it comes first
ACTIVE_S = 1.0  # a tenant counts as active this long after its last request has ended


def by_priority(
    entries: Sequence[T], tenant: Callable[[T], bytes], priority: Callable[[T], int]
) -> list[T]:
    """Sort the queue entries of each tenant by priority, lowest value first, stably. A tenant's
    entries only exchange places with each other, so no tenant gains a place from another."""
    by_tenant: dict[bytes, list[T]] = {}
    for entry in entries:
        by_tenant.setdefault(tenant(entry), []).append(entry)
    ordered = {
        name: iter(sorted(tenant_entries, key=priority))
        for name, tenant_entries in by_tenant.items()
    }
    return [next(ordered[tenant(entry)]) for entry in entries]


class Turns:
    """Order in which tenants with prompts to compute take turns: the tenant with the fewest
    computed prompt tokens first.

    A tenant that just arrived comes before tenants whose prompts are already being computed, but
    after tenants that arrived earlier and have no computed tokens yet, and after any tenant that
    more than MAX_PASSED steps in a row passed over.
    """

    def __init__(self) -> None:
        self._computed: dict[bytes, int] = {}
        self._passed: Counter[bytes] = Counter()  # steps since its last tokens or its arrival
        self._begun: set[bytes] = set()  # tenants with computed tokens since their arrival
        self._active: dict[bytes, float] = {}  # when each tenant last had a request

    def are_shared(self, tenants: Iterable[bytes], now_s: float) -> bool:
        """Return whether several tenants share the engine: those with requests now (`tenants`), and
        those whose last request ended less than ACTIVE_S seconds ago."""
        for tenant in set(tenants):
            self._active[tenant] = now_s
        if len(self._active) > 1:
            oldest = now_s - ACTIVE_S
            self._active = {
                name: active_s for name, active_s in self._active.items() if active_s >= oldest
            }
        return len(self._active) > 1

    def order(self, entries: Sequence[T], tenant: Callable[[T], bytes]) -> Sequence[T]:
        """Reorder queue entries so that tenants take turns: the first entry of each tenant, then
        the second of each, and so on."""
        tenants = {tenant(entry) for entry in entries}
        counts = {name: count for name, count in self._computed.items() if name in tenants}
        self._begun &= tenants
        if self._begun:
            start = min(counts[name] for name in self._begun) - 1
        else:
            start = min(counts.values(), default=0)
        self._computed = dict.fromkeys(tenants, start) | counts
        self._passed = Counter({name: self._passed[name] + 1 for name in tenants})
        if len(tenants) < 2:
            return entries
        num_earlier: Counter[bytes] = Counter()
        ranked: list[tuple[int, int, int, T]] = []
        for entry in entries:
            name = tenant(entry)
            overdue = max(0, self._passed[name] - MAX_PASSED)
            ranked.append((num_earlier[name], -overdue, self._computed[name], entry))
            num_earlier[name] += 1
        ranked.sort(key=lambda item: item[:3])
        return [entry for *_, entry in ranked]

    def computed(self, tenant: bytes, tokens: int) -> None:
        """Record that a step computes this number of prompt tokens of a tenant."""
        if tenant in self._computed:
            self._computed[tenant] += tokens
            self._passed[tenant] = 0
            self._begun.add(tenant)


Rank = tuple[float, int]  # of a job within its tenant
FIRST: Rank = (-math.inf, 0)  # before every job


class Fairness:
    """What one step of the Scheduler owes to requests that the previous step passed over; the table
    in the module docstring lists these debts. Tenants are named as in Request.tenant."""

    def __init__(self) -> None:
        self._left_out: dict[bytes, Rank] = {}
        self._gave_way = False
        self._kept_out = False
        self._short: RequestState | None = None
        self._refused: RequestState | None = None

    @property
    def gave_way(self) -> bool:
        """Whether, in the current step, a tenant gets no decode rows so that the first prompt of
        another tenant can run."""
        return self._gave_way

    @property
    def short(self) -> RequestState | None:
        """The first queued request that lacked KV blocks in the last step; None if no request
        did."""
        return self._short

    def begin_rows(self, tenants: Iterable[bytes], prompt_waits: bool) -> dict[bytes, Rank]:
        """Return the tenants that get decode rows in this step, each with the rank of the request
        to begin with: the one at which its share ran out in the previous step (see `leave_out`), or
        the first.

        `prompt_waits`: whether a prompt of a tenant without running requests could start. If so,
        the tenants whose share ran out get no rows, to leave room for the prompt, unless tenants
        already gave way like this in the previous step."""
        ranks = {tenant: self._left_out.get(tenant, FIRST) for tenant in tenants}
        gives_way = prompt_waits and not self._gave_way
        waiting = {t: rank for t, rank in ranks.items() if gives_way and rank != FIRST}
        self._gave_way, self._left_out = bool(waiting), waiting
        return {t: rank for t, rank in ranks.items() if t not in waiting}

    def leave_out(self, tenant: bytes, rank: Rank) -> None:
        """Record that a tenant's share of decode rows was used up before its request of this rank;
        the next step begins with that job."""
        self._left_out[tenant] = rank

    def begin_chunks(self) -> bool:
        """Begin the prefill chunks of a step. Return whether the first chunk of every tenant may
        exceed its share, because in the previous step a tenant got no chunk."""
        kept_out, self._kept_out = self._kept_out, False
        return kept_out

    def keep_out(self) -> None:
        """Record that a tenant got no prefill chunk in this step because its first chunk exceeds
        its share."""
        self._kept_out = True

    def end_chunks(self, short: RequestState | None) -> None:
        """End the prefill chunks of a step: record the first queued request that lacks KV blocks
        (None if no request does), and forget the refused reservation, which delayed requests for
        this step only."""
        self._short, self._refused = short, None

    def refuse(self, reservation: RequestState) -> None:
        """Record the request whose reservation of blocks was refused; in the next step no queued
        request after it gets blocks."""
        self._refused = reservation

    def held_up(self, job: RequestState) -> bool:
        """Whether the request must not get blocks in this step because a refused reservation
        precedes it."""
        return self._refused is not None and self._refused.precedes(job)

    def must_wait(self, reserving: RequestState) -> bool:
        """Whether a reservation of blocks must wait because a queued request that lacks blocks
        precedes it. `reserving`: the request to reserve for."""
        return self._short is not None and self._short.precedes(reserving)
