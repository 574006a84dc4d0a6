"""The time that the processes of `pdserve up` may take to stop."""

from pdserve.services.common.options import GRACE_S, STOP_S
from pdserve.services.worker.settings import DEREGISTER_S, ENGINE_CLOSE_S

NUM_STAGES = 4  # gateway, decode, prefill, router, one after the other
SLACK_S = NUM_STAGES * (GRACE_S + STOP_S) + 2 * (DEREGISTER_S + ENGINE_CLOSE_S)


def stop_limit_s(drain_s: float) -> float:
    """Return the seconds after which a process that still runs has failed to stop: each stage may
    drain for `drain_s`."""
    return NUM_STAGES * drain_s + SLACK_S
