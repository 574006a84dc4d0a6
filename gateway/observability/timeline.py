"""The phases of one request, in order and without gaps.

Invariant: the phases before the first token sum to the time to first token. The gateway measures
the first two; router and decode worker report the next (protos/common.proto). "return" is the
remainder: the communication between the processes in both directions.
"""

from dataclasses import dataclass

from pdserve.protos.common_pb2 import Phases


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """One phase, in seconds; `start_s` counts from the arrival of the request's head."""

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
    """Return the phases of a request whose body took `receive_s` to receive. The other times count
    from the end of the body. Times and phases not known yet are None."""
    result: list[RequestPhase] = []

    def add(name: str, duration_s: float) -> None:
        start_s = result[-1].end_s if result else 0.0
        result.append(RequestPhase(name, start_s, duration_s))

    add("receive", receive_s)
    if prepared_s is None:
        add("prepare", elapsed_s)
        return result
    add("prepare", prepared_s)
    until_s = elapsed_s if first_token_s is None else first_token_s
    if phases is None:
        add("wait", until_s - prepared_s)  # router and decode worker have not reported yet
    else:
        add("route", phases.route_s)
        add("queue", max(0.0, phases.queue_s - phases.route_s))
        add("prefill", phases.prefill_s)
        add("transfer", phases.transfer_s)
        add("first_token", phases.first_token_s)
        add("return", max(0.0, receive_s + until_s - result[-1].end_s))
    if first_token_s is not None:
        add("decode", elapsed_s - first_token_s)
    return result
