"""Pairs of a Sender and a Receiver that must release everything."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders.engine_kit import assert_at_rest, fake_engine
from oracles.rings import assert_conform
from systems.eventually import LIMIT_S
from systems.handoff_pair import MakePair, Pair

from pdserve.engine.transport.base import transports

TRANSPORTS = list(transports())
CHANGES = ("decode_identity", "mixing", "encrypted", "decode_encrypted")  # of Pair itself


@pytest.fixture
def make_pair(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakePair]:
    """Return a function that makes pairs; patches of the test stay until the rings are checked."""
    made: list[Pair] = []
    # There is no router here to retry where a machine is too busy to connect in time.
    monkeypatch.setattr("pdserve.engine.handoff.connection.connect.DIAL_S", LIMIT_S)
    rings = tmp_path_factory.mktemp("rings")

    def make(transport: str = "tcp", decode: dict[str, Any] | None = None, **engine: Any) -> Pair:
        change = {k: engine.pop(k) for k in list(engine) if k in CHANGES}
        engine = {"num_blocks": 256} | engine
        prefill = fake_engine(**engine)
        other = fake_engine(**(engine | (decode or {})))
        pair = Pair(prefill, other, transport, tmp_path, rings=rings, **change)
        made.append(pair)
        return pair

    yield make
    before = threading.active_count()
    for pair in made:
        pair.close()
        assert_at_rest(pair.prefill)
        assert_at_rest(pair.decode)
    assert threading.active_count() < before or not made
    assert not list(tmp_path.iterdir()), "a socket is still open"
    if made:
        assert_conform(rings)


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest, make_pair: MakePair) -> Pair:
    return make_pair(request.param)
