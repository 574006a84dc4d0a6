"""What a step owes the requests that it passed over; the next step pays it. Pure.

  +--- What a step leaves to later ones -----------------------------------------------------------+
  | debt      to whom                 set by             effect                 ends               |
  | --------- ----------------------- ------------------ ---------------------- ------------------ |
  | left out  decode rows of a tenant leave_out: they    they come first        begin_rows, unless |
  |           by rank                 exceed its share                          the tenant gives   |
  |                                                                             way then           |
  | gave way  the tenants left out    begin_rows: first  none gives way         the next           |
  |           that got no row         prompt of another  again at once          begin_rows         |
  | kept out  a tenant without a      keep_out: its      the first chunk of     begin_chunks       |
  |           chunk                   chunk exceeds its  each tenant runs,                         |
  |                                   share              whatever its size                         |
  | short     the first queued job    end_chunks         reservations that it   the end_chunks of  |
  |           that lacks blocks                          precedes wait          a step without one |
  | refused   a refused reservation   refuse             queued jobs that it    end_chunks         |
  |                                                      precedes get no blocks                    |
  +------------------------------------------------------------------------------------------------+

Only the methods here write these fields, and only the Scheduler calls them.
"""

import math
from collections.abc import Iterable

from pdserve.engine.scheduling.request_state import RequestState

Rank = tuple[float, int]  # of a job within its tenant
FIRST: Rank = (-math.inf, 0)  # before every job


class Fairness:
    """The debts between two steps. Tenants are named as in their requests."""

    def __init__(self) -> None:
        self._left_out: dict[bytes, Rank] = {}
        self._gave_way = False
        self._kept_out = False
        self._short: RequestState | None = None
        self._refused: RequestState | None = None

    @property
    def gave_way(self) -> bool:
        """Whether a tenant got no decode rows so that another's first prompt can run."""
        return self._gave_way

    @property
    def short(self) -> RequestState | None:
        """The first queued job that lacked blocks in the last step."""
        return self._short

    def begin_rows(self, tenants: Iterable[bytes], prompt_waits: bool) -> dict[bytes, Rank]:
        """Return the tenants that get decode rows, each with the rank of the job to begin with.
        `prompt_waits`: another tenant's first prompt can begin."""
        ranks = {tenant: self._left_out.get(tenant, FIRST) for tenant in tenants}
        gives_way = prompt_waits and not self._gave_way
        waiting = {t: rank for t, rank in ranks.items() if gives_way and rank != FIRST}
        self._gave_way, self._left_out = bool(waiting), waiting
        return {t: rank for t, rank in ranks.items() if t not in waiting}

    def leave_out(self, tenant: bytes, rank: Rank) -> None:
        """Note that a tenant's share was used up before the job of this rank."""
        self._left_out[tenant] = rank

    def begin_chunks(self) -> bool:
        """Return whether the first chunk of every tenant runs, whatever its size."""
        kept_out, self._kept_out = self._kept_out, False
        return kept_out

    def keep_out(self) -> None:
        """Note that a tenant got no chunk because its first one exceeds its share."""
        self._kept_out = True

    def end_chunks(self, short: RequestState | None) -> None:
        """Note the first queued job that lacks blocks; a refused reservation has had its turn."""
        self._short, self._refused = short, None

    def refuse(self, reservation: RequestState) -> None:
        """Note the job of a refused reservation."""
        self._refused = reservation

    def held_up(self, job: RequestState) -> bool:
        """Whether a refused reservation precedes the job."""
        return self._refused is not None and self._refused.precedes(job)

    def must_wait(self, reserving: RequestState) -> bool:
        """Whether a queued job that lacks blocks precedes the job that requests a reservation."""
        return self._short is not None and self._short.precedes(reserving)
