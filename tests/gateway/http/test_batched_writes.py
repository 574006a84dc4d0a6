"""Writes of one event-loop pass are sent together, in order, and never to a closing connection."""

import asyncio

import pytest

from pdserve.gateway.http.serving.protocol import BatchedWrites

pytestmark = pytest.mark.anyio


class Transport(asyncio.Transport):
    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        super().__init__()
        self.log = log
        self.name = name
        self.closing = False

    def write(self, data) -> None:
        self.log.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


async def test_writes_of_one_pass_are_sent_together():
    log: list[tuple[str, bytes]] = []
    writes, a, b = BatchedWrites(), Transport(log, "a"), Transport(log, "b")
    writes.write(a, (b"1", b"2"))
    writes.write(b, (b"x",))
    writes.write(a, (b"3",))
    assert (log, writes.num_waiting(a), writes.num_waiting(b)) == ([], 3, 1)
    await asyncio.sleep(0)
    assert log == [("a", b"123"), ("b", b"x")]
    writes.write(b, (b"y",))
    await asyncio.sleep(0)
    assert log[2:] == [("b", b"y")]


async def test_flushed_data_is_not_written_again():
    log: list[tuple[str, bytes]] = []
    writes, a, b = BatchedWrites(), Transport(log, "a"), Transport(log, "b")
    writes.write(a, (b"1",))
    writes.write(b, (b"x",))
    writes.flush(a)
    writes.flush(a)
    assert log == [("a", b"1")]
    b.closing = True
    await asyncio.sleep(0)
    assert log == [("a", b"1")]
    assert writes.num_waiting(b) == 0
