"""Invalid records, which must change neither a byte of a block nor a bit of a bitmap."""

from pathlib import Path

import pytest
from fakes.hostile_peer import Attack
from systems.handoff_pair import DIRECT_TRANSPORTS
from systems.shuffled_frames import ShuffledPair
from systems.victim import Victim

from pdserve.engine.transport.base import transports

# A direct transport has no payload bytes that pass through the host: its own tests attack it.
HOST_TRANSPORTS = [name for name in transports() if name not in DIRECT_TRANSPORTS]


@pytest.mark.parametrize("encrypted", [False, True], ids=["tagged", "sealed"])
@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_hostile_frames_change_nothing(transport: str, encrypted: bool, tmp_path: Path) -> None:
    with Victim(transport, tmp_path, encrypted) as victim, Attack(victim, seed=1) as attack:
        attack.run(500)
    assert sum(attack.kinds.values()) == 500
    assert not [kind for kind in (*attack.staying, *attack.closing) if not attack.kinds[kind]]
    assert attack.kinds["truncated"] > 5
    assert attack.outcomes["connection closed"] > 10
    counters = victim.receiver.counters
    for counter in ("corrupt_frames", "late_frames", "refused"):
        assert counters[counter] > 0
    assert not victim.received


@pytest.mark.parametrize("window", [0, 10], ids=["full", "full and window"])
@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_frames_in_any_order_and_twice_arrive_once(
    transport: str, window: int, tmp_path: Path
) -> None:
    with ShuffledPair(transport, tmp_path, seed=2, window=window) as shuffled:
        for number in range(30):
            shuffled.transfer(number)
        shuffled.pair.assert_clean()
    assert shuffled.commits == 30
    assert shuffled.reordered > 20
    assert shuffled.duplicates > 60
