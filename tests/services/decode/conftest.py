"""A decode and a prefill service over real gRPC that must release everything."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from systems.worker_kit import (
    Pair,
    build_with,
    engine_maker,
    worker_pair,
)

Test = Callable[[Pair], Awaitable[None]]


@pytest.fixture
def with_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    def run_test(
        test: Test,
        transport: str = "tcp",
        engine: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        build_with(monkeypatch, engine_maker(**(engine or {})))

        async def main() -> None:
            async with worker_pair(tmp_path, transport, **settings) as pair:
                await test(pair)

        before = threading.active_count()
        asyncio.run(main())
        names = [t.name for t in threading.enumerate() if t.name.startswith(("kv-", "engine"))]
        assert not names, (before, names)
        assert not list(tmp_path.iterdir())

    return run_test
