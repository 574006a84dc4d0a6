"""Log lines and options."""

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime

import pytest

from pdserve.services.common.logs import configure_logging, logs_json
from pdserve.services.common.options import option


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


@pytest.fixture
def json_lines() -> Iterator[Callable[[], list[dict[str, str]]]]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    out = io.StringIO()
    configure_logging("router", "info", out, "json")
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    root.handlers[:] = handlers
    root.setLevel(level)


def test_each_line_is_a_json_object(json_lines: Callable[[], list[dict[str, str]]]) -> None:
    assert logs_json()
    before = datetime.now(UTC)
    logging.getLogger("pdserve.test").info("hello %s", 'a\n"b"', extra={"request": "req-1"})
    logging.getLogger("pdserve.test").debug("not this")
    for name in ("uvicorn.error", "grpc._cython.cygrpc"):  # which have no separate handlers
        logging.getLogger(name).warning("theirs")
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("pdserve.test").exception("it failed")
    first, *theirs, failed = json_lines()
    time = first.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert abs((datetime.fromisoformat(time) - before).total_seconds()) < 60
    assert first == {
        "level": "info",
        "component": "router",
        "logger": "pdserve.test",
        "message": 'hello a\n"b"',
        "request_id": "req-1",
    }
    assert [line["logger"] for line in theirs] == ["uvicorn.error", "grpc._cython.cygrpc"]
    assert all("request_id" not in line and "exception" not in line for line in theirs)
    assert failed["level"] == "error"
    assert failed["exception"].startswith("Traceback")
    assert failed["exception"].endswith("KeyError: 'lost'")


def test_an_uncaught_exception_is_json(json_lines: Callable[[], list[dict[str, str]]]) -> None:
    def fail() -> None:
        raise KeyError("of a thread")

    thread = threading.Thread(target=fail, name="loader")
    thread.start()
    thread.join()
    error = ValueError("of main")
    sys.excepthook(ValueError, error, None)
    first, second = json_lines()
    assert first["message"] == "unexpected failure of thread loader"
    assert "KeyError: 'of a thread'" in first["exception"]
    assert "ValueError: of main" in second["exception"]


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
