"""The HTTP server uses names of uvicorn that are not documented, and checks that they are there."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pdserve.gateway.http.serving.protocol import UVICORN_VERSIONS, check_uvicorn

ROOT = Path(__file__).parents[3]


class _NoCycle:
    def __init__(self) -> None:
        self.keep_alive = True


def test_a_missing_name_is_an_error_with_the_versions() -> None:
    class Renamed:
        def __init__(self) -> None:
            self.cycle = self.flow = self.headers = self.loop = None
            self.parser = self.pipeline = self.scope = self.transport = None

        def on_response_complete(self) -> None: ...

        def send_400_response(self) -> None: ...

    with pytest.raises(RuntimeError) as error:
        check_uvicorn(Renamed, RequestResponseCycle)
    assert f"uvicorn {version('uvicorn')}, which lacks _start_asgi_task: " in str(error.value)
    assert UVICORN_VERSIONS in str(error.value)
    with pytest.raises(RuntimeError, match="lacks chunked_encoding, disconnected, "):
        check_uvicorn(HttpToolsProtocol, _NoCycle)


def test_the_versions_are_those_of_the_requirement_and_of_the_constraints() -> None:
    first, last = UVICORN_VERSIONS.split(" to ")
    assert f'"uvicorn>={first}"' in (ROOT / "pyproject.toml").read_text()
    pinned = re.search(r"^uvicorn==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1].startswith(f"{last}.")
