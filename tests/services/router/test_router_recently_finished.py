"""Placements of requests that have just ended."""

from pdserve.protos import common_pb2 as pb
from pdserve.services.router.dispatcher import KEEP_S, RecentlyFinished

KEY = (b"gateway", "r")
PLACE = pb.Placement(attempt=b"a" * 16)


def restored(finished: RecentlyFinished, epoch: int, key: tuple[bytes, str] = KEY) -> pb.Start:
    start = pb.Start(epoch=epoch)
    finished.restore(key, start)
    return start


def test_only_a_later_epoch_of_the_same_request_is_restored() -> None:
    finished = RecentlyFinished()
    finished.add(KEY, 3, PLACE, 10.0)
    assert restored(finished, 4).placement == PLACE
    assert restored(finished, 9).placement == PLACE, "it may be issued again more than once"
    assert not restored(finished, 3).HasField("placement")
    assert not restored(finished, 4, (b"other", "r")).HasField("placement")


def test_a_placement_from_the_gateway_is_kept() -> None:
    finished = RecentlyFinished()
    finished.add(KEY, 3, PLACE, 10.0)
    start = pb.Start(epoch=4, placement=pb.Placement(attempt=b"b" * 16))
    finished.restore(KEY, start)
    assert start.placement.attempt == b"b" * 16


def test_placements_are_forgotten_in_order_and_in_time() -> None:
    finished = RecentlyFinished()
    finished.add(KEY, 1, PLACE, 10.0)
    finished.add((b"gateway", "s"), 1, PLACE, 12.0)
    finished.tick(10.0 + KEEP_S - 0.1)
    assert len(finished) == 2
    finished.tick(10.0 + KEEP_S)
    assert len(finished) == 1
    assert not restored(finished, 2).HasField("placement")
    finished.add((b"gateway", "s"), 2, PLACE, 14.0)
    finished.tick(12.0 + KEEP_S)
    assert len(finished) == 1, "it ended again"
