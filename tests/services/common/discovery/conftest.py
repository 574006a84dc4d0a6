"""A fake API server that processes find as in a pod."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.kubernetes import FakeKubernetes

from pdserve.services.common import kubernetes, kubernetes_api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    made = FakeKubernetes(tmp_path)
    made.start()
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setattr(kubernetes, "MAX_BACKOFF_S", 0.5)
    yield made
    made.stop()
