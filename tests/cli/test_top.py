"""`pdserve top` on the metrics of a real gateway."""

import sys
from collections.abc import Iterator

import pytest
from fakes.api_server import ApiServer, api_server
from systems.terminal import in_terminal

from pdserve.cli.main import main
from pdserve.cli.top import parse_snapshot, rates, screen
from pdserve.gateway.metrics import GatewayMetrics
from pdserve.protos import common_pb2 as common
from pdserve.protos import fleet_pb2 as fleet
from pdserve.protos import router_pb2 as router


def view(moved: int = 0) -> router.FleetView:
    workers = []
    for role, address, load in (
        ("DECODE", "h:1", {"running": 3, "blocks_used": 25, "prefix_queries": 10}),
        ("PREFILL", "h:2", {"waiting": 2, "blocks_cached": 7}),
    ):
        made = fleet.Load(blocks_total=100, blocks_free=40, prefix_hits=5, **load)
        made.transports.add(transport="tcp", bytes=moved)
        hello = fleet.WorkerHello(
            role=fleet.Role.Value(role), address=address, card=common.ModelCard(name="tiny")
        )
        workers.append(router.WorkerView(hello=hello, load=made, state="live"))
    return router.FleetView(workers=workers)


def metrics(tokens: int = 0, moved: int = 0) -> str:
    made = GatewayMetrics()
    made.fleet.update(view(moved))
    made.ttft.labels("tiny").observe(0.1)
    made.itl.of("tiny").observe(0.01, tokens)
    made.prompt_tokens.labels("tiny").inc(20)
    made.open.labels("open").set(4)
    return made.page(with_fleet=True).decode()


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        made.metrics = metrics()
        yield made


def test_a_snapshot() -> None:
    found = parse_snapshot(metrics(tokens=9))
    decode = found.workers["h:1"]
    assert (decode.role, decode.model, decode.state) == ("decode", "tiny", "live")
    assert (decode.running, decode.kv_usage, decode.blocks["free"]) == (3, 0.25, 40)
    assert found.workers["h:2"].waiting == 2
    assert found.output_tokens == 10
    assert found.prompt_tokens == 20
    assert found.requests == {"open": 4}


def test_rates() -> None:
    before, now = parse_snapshot(metrics()), parse_snapshot(metrics(tokens=30, moved=6_000_000))
    found = rates(before, now, 2.0)
    assert found.output_tokens == 15
    assert found.transfer_bytes == {"h:1": 3e6, "h:2": 3e6}
    assert rates(now, before, 1.0).output_tokens == 0  # after a restart of the gateway


def test_the_screen() -> None:
    now = parse_snapshot(metrics())
    lines = screen("url", now, rates(now, now, 1.0))
    assert lines[0] == "url: 2 workers of tiny"
    assert lines[1] == "3 running, 2 waiting; in the gateway: 4 open"
    (row,) = (line for line in lines if line.startswith("decode"))
    assert row.split()[:5] == ["decode", "h:1", "live", "3", "0"]
    assert "███░░░░░░░░░  25%" in row
    assert "50%" in row
    assert "model" not in lines[5]
    now.workers["h:2"].model = "other"
    assert screen("url", now, None)[5].endswith("model")
    del now.workers["h:2"]
    assert screen("url", now, None)[:2] == [
        "url: 1 worker of tiny",
        "3 running, 0 waiting; in the gateway: 4 open",
    ]
    assert "no worker has joined" in screen("url", parse_snapshot(""), None)


def test_the_table_fits_80_columns() -> None:
    now = parse_snapshot(metrics())
    for worker in now.workers.values():
        worker.address = "127.0.0.1:35399"
    lines = screen("http://127.0.0.1:8000", now, rates(now, now, 1.0), 80)
    assert max(map(len, lines)) <= 80
    assert lines[5].endswith("KV MB/s")


def test_once_prints_one_screen(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", server.url]) == 0
    out = capsys.readouterr().out
    assert "2 workers" in out
    assert "\x1b" not in out


def test_errors(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.key = "right"
    assert main(["top", "--once", "--url", server.url]) == 1
    assert "--api-key" in capsys.readouterr().err
    server.key, server.metrics = "", "{"
    assert main(["top", "--once", "--url", server.url]) == 1
    assert "does not return pdserve's metrics" in capsys.readouterr().err
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "pdserve up" in capsys.readouterr().err


def test_the_screen_is_redrawn_until_q(server: ApiServer) -> None:
    command = [sys.executable, "-m", "pdserve.cli.main", "top", "--url", server.url]
    with in_terminal([*command, "--interval-s", "0.1"]) as terminal:
        terminal.wait_for("2 workers")
        terminal.wait_for("output - tokens/s")
        terminal.wait_for("output 0.0 tokens/s")
        server.key = "now there is one"
        terminal.wait_for("retrying; press q to quit")
        server.key = ""
        terminal.wait_for("2 workers")
        terminal.type("q")
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text
