"""A prefill worker killed late in a long prompt: decode goes on from the last verified block."""

from collections.abc import Iterator

import pytest
from eventually import wait_until
from fleet import Fleet
from late_kill import ask, kill_late, received

LENGTH = 2_400
CHUNK = 64
OPTIONS = ("--kv-tokens", "8192", "--chunk-size", str(CHUNK), "--remote-prefill", "always")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet("--prefill", "2", "--decode", "1", "--kv-transport", "tcp", *OPTIONS) as fleet:
        yield fleet


def test_a_prefill_killed_late_costs_only_the_missing_chunks(fleet: Fleet) -> None:
    whole, finished = ask(fleet, LENGTH, b"fault-free")
    assert finished.remote
    size = wait_until(lambda: received(fleet), "a report of decode")
    killed = kill_late(fleet, LENGTH, 0.75, size, b"faulty")
    assert 0.75 <= killed.share < 1, "it was killed between the first and the last frame"
    assert killed.ids == whole
    assert not killed.finished.remote, "decode went on itself"
    assert killed.finished.cached_tokens == 0, "what was verified is no cache hit of the request"
    assert 1 < killed.decoded <= (1 - killed.share) * LENGTH + 2 * CHUNK
    assert killed.prefilled == 0, "no other worker has begun anew"
