"""Line 6, second half: a prefill worker killed at 80 % of 4,000 tokens costs at most a quarter.

Every prompt token that another worker computes for the request after the kill is counted: the
missing ones, and those computed again.
"""

import json
import sys

from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.late_kill import Outcome, ask, kill_late, received

LENGTH, KILLS, SHARE = 4_000, 10, 0.8
MOST_AGAIN = 0.25
OPTIONS = (
    "--prefill", "2", "--decode", "1", "--kv-transport", "tcp", "--kv-tokens", "16384",
    "--remote-prefill", "always",
)  # fmt: skip


def holds(killed: Outcome, whole: list[int]) -> bool:
    within = killed.decoded + killed.prefilled <= MOST_AGAIN * LENGTH
    return within and killed.ids == whole and SHARE <= killed.share < 1


def main() -> int:
    with Fleet(*OPTIONS) as fleet:
        whole, _ = ask(fleet, LENGTH, b"fault-free")
        size = wait_until(lambda: received(fleet), "a report of decode", limit_s=10)
        kills: list[Outcome] = []
        for number in range(KILLS):
            wait_until(lambda: len(fleet.pids("prefill")) == 2, "two prefill workers")
            wait_until(lambda: len(fleet.blocks()) == 3, "all workers")
            kills.append(kill_late(fleet, LENGTH, SHARE, size, b"faulty %d" % number))
    figures = {
        "ok": all(holds(killed, whole) for killed in kills),
        "prompt_tokens": LENGTH,
        "killed_at": [round(killed.share, 3) for killed in kills],
        "computed_after": [killed.decoded + killed.prefilled for killed in kills],
        "by_prefill": [killed.prefilled for killed in kills],
        "tokens_equal": sum(killed.ids == whole for killed in kills),
    }
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
