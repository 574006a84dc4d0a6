"""The table of stored responses: contents, ownership and expiry."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pdserve.gateway.storage import KeptResponse
from pdserve.gateway.storage.database import Database
from pdserve.gateway.storage.responses import DatabaseResponses, ResponseBounds
from pdserve.protos.common_pb2 import UNAVAILABLE
from pdserve.services.common.errors import ServiceError

pytestmark = pytest.mark.anyio


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
async def make_store(
    tmp_path: Path, clock: Time, anyio_backend: str
) -> AsyncIterator[Callable[..., object]]:
    """Open stores of several gateways on one file."""
    opened: list[Database] = []

    async def make(**bounds: float) -> DatabaseResponses:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'gateway.db'}")
        opened.append(database)
        await database.start()
        return DatabaseResponses(database, clock, ResponseBounds(**bounds))  # type: ignore[arg-type]

    yield make
    for database in opened:
        await database.close()


def kept(name: str, size: int = 4) -> KeptResponse:
    return KeptResponse(name, '"' + "x" * (size - 4) + '"', "[]")


async def names(store: DatabaseResponses, tenant: bytes, *wanted: str) -> list[str]:
    return [name for name in wanted if await store.find(tenant, name) is not None]


async def test_two_gateways_share_responses(make_store):
    one, other = await make_store(), await make_store()
    response = KeptResponse("resp_1", '{"id":"resp_1"}', '[{"role":"user","content":"é"}]')
    assert await one.save(b"\1", response)
    assert await other.find(b"\1", "resp_1") == response
    assert await other.remove(b"\1", "resp_1")
    assert await one.find(b"\1", "resp_1") is None
    assert not await one.remove(b"\1", "resp_1")


async def test_a_tenant_sees_only_its_responses(make_store):
    store = await make_store()
    await store.save(b"\1", kept("a"))
    await store.save(b"", kept("a", 9))
    assert await store.find(b"\2", "a") is None
    assert not await store.remove(b"\2", "a")
    mine, everybodys = await store.find(b"\1", "a"), await store.find(b"", "a")
    assert (mine.num_bytes, everybodys.num_bytes) == (4, 9)


async def test_responses_expire_permanently(make_store, clock):
    store = await make_store(keep_s=10)
    await store.save(b"", kept("old"))
    clock.now += 9
    assert await names(store, b"", "old") == ["old"]
    clock.now += 1
    assert await names(store, b"", "old") == []
    await store.save(b"", kept("new"))
    clock.now -= 5  # the row is deleted, not only hidden
    assert await names(store, b"", "old", "new") == ["new"]


async def test_the_oldest_responses_make_room(make_store, clock):
    store = await make_store(max_rows=3, max_total_bytes=100)
    for number in range(5):
        clock.now += 1
        await store.save(b"", kept(str(number)))
        await store.save(b"\1", kept(str(number)))
    assert await names(store, b"", *"01234") == ["2", "3", "4"]
    clock.now += 1
    await store.save(b"", kept("large", 93))
    assert await names(store, b"", *"01234", "large") == ["4", "large"]
    assert await names(store, b"\1", *"01234") == ["2", "3", "4"], (
        "responses of another tenant must stay"
    )


async def test_many_small_responses_make_room_for_a_large_one(make_store, clock):
    store = await make_store(max_total_bytes=200)
    wanted = [str(number) for number in range(50)]
    for name in wanted:
        clock.now += 1
        await store.save(b"", kept(name))
    clock.now += 1
    await store.save(b"", kept("large", 190))
    assert await names(store, b"", *wanted, "large") == ["48", "49", "large"]


async def test_an_oversized_response_is_not_stored(make_store):
    store = await make_store(max_bytes=20)
    assert await store.save(b"", kept("fits", 20))
    assert not await store.save(b"", kept("large", 21))
    assert await names(store, b"", "fits", "large") == ["fits"]


async def test_a_database_that_fails_is_a_typed_error(tmp_path):
    (tmp_path / "broken.db").write_bytes(b"secret " * 1000)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'broken.db'}")
    with pytest.raises(ServiceError) as caught:
        await DatabaseResponses(database, Time()).find(b"", "a")
    assert caught.value.code == UNAVAILABLE
    assert "broken" not in caught.value.message
    await database.close()
