"""The phases of one request, in order, without gaps: up to the first token their sum is the time to
it.

The gateway measures the first two, router and decode say the next ones (protos/common.proto), and
"return" is what is left: the ways between the processes, there and back.
"""

from dataclasses import dataclass

from pdserve.protos.common_pb2 import Phases


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """Seconds; `start_s` is since the request's head had come."""

    name: str
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def timeline(
    receive_s: float,
    prepared_s: float | None,
    first_token_s: float | None,
    elapsed_s: float,
    phases: Phases | None,
) -> list[RequestPhase]:
    """Of a request whose body took `receive_s`; the other times are since then. What did not happen
    yet, or is not known, is None."""
    found: list[RequestPhase] = []

    def add(name: str, duration_s: float) -> None:
        start_s = found[-1].end_s if found else 0.0
        found.append(RequestPhase(name, start_s, duration_s))

    add("receive", receive_s)
    if prepared_s is None:
        add("prepare", elapsed_s)
        return found
    add("prepare", prepared_s)
    until_s = elapsed_s if first_token_s is None else first_token_s
    if phases is None:
        add("wait", until_s - prepared_s)  # router and decode have not said more
    else:
        add("route", phases.route_s)
        add("queue", max(0.0, phases.queue_s - phases.route_s))
        add("prefill", phases.prefill_s)
        add("transfer", phases.transfer_s)
        add("first_token", phases.first_token_s)
        add("return", max(0.0, receive_s + until_s - found[-1].end_s))
    if first_token_s is not None:
        add("decode", elapsed_s - first_token_s)
    return found
