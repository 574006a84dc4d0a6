"""Log lines and options."""

import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields

import pytest

from pdserve.services.host.logs import configure_logging
from pdserve.services.host.options import option


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    out = io.StringIO()
    configure_logging("router", "info", out)
    yield out
    root.handlers[:] = handlers
    root.setLevel(level)


def test_one_line_with_component_and_request(stream: io.StringIO) -> None:
    log = logging.getLogger("pdserve.test")
    log.info("hello %s", "you", extra={"request": "req-1"})
    log.debug("not this")
    (line,) = stream.getvalue().splitlines()
    _, level, component, rest = line.split(maxsplit=3)
    assert (level, component, rest) == ("INFO", "router", "hello you  request=req-1")


def test_a_line_break_cannot_forge_a_line(stream: io.StringIO) -> None:
    logging.getLogger("x").warning("a\n12:00:00 ERROR b", extra={"request": "c\nd"})
    assert len(stream.getvalue().splitlines()) == 1


def test_option_metadata() -> None:
    @dataclass(frozen=True)
    class Settings:
        port: int = option(8000, "where", min=0, max=65535)
        key: str = option("", "who", secret=True, flag="--api-key")
        mode: str = option("a", "how", choices=("a", "b"))

    by_name = {f.name: dict(f.metadata) for f in fields(Settings)}
    assert by_name["port"] == {"help": "where", "min": 0, "max": 65535}
    assert by_name["key"] == {"help": "who", "secret": True, "flag": "--api-key"}
    assert by_name["mode"] == {"help": "how", "choices": ("a", "b")}
    assert Settings().port == 8000
