"""Each engine test over the fake decoder runs twice: with one step after the other, and with each
step launched before the tokens of the previous step are read."""

from collections.abc import Iterator

import pytest
from builders import engine_kit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in TWICE:
        metafunc.fixturenames.append("launches_ahead")
        metafunc.parametrize(
            "launches_ahead",
            [False, True],
            indirect=True,
            ids=["step by step", "ahead"],
            scope="module",
        )


TWICE = (
    "test_engine",
    "test_engine_aborts",
    "test_engine_hold",
    "test_engine_limits",
    "test_engine_park",
    "test_engine_thread",
    "test_window_pools",
)


@pytest.fixture(scope="module")
def launches_ahead(request: pytest.FixtureRequest) -> Iterator[bool]:
    before, engine_kit.launches_ahead = engine_kit.launches_ahead, request.param
    yield request.param
    engine_kit.launches_ahead = before
