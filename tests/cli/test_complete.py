"""`pdserve complete` against a small HTTP server: results, errors, and resuming after a stop."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.api_server import ApiServer, api_server
from systems.eventually import wait_until

from pdserve.cli.commands import STOPPED
from pdserve.cli.main import main

PROMPT = {"prompt": "hi"}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        made.reply = lambda body: (200, {"echo": body})
        yield made


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.complete.PAUSES_S", (0.01, 0.01))


def write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def results(path: Path) -> dict[str, Any]:
    """Return results by id; each id is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def complete(server: ApiServer, source: Path, *words: str) -> tuple[int, Path]:
    out = source.with_name("out.jsonl")
    return main(["complete", str(source), str(out), "--url", server.url, *words]), out


def test_each_kind_of_line(server: ApiServer, tmp_path: Path) -> None:
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": PROMPT}
    chat = {"id": 7, "messages": [{"role": "user", "content": "x"}], "model": "own", "seed": 1}
    source = write(tmp_path / "in.jsonl", batch, "", chat, PROMPT)
    code, out = complete(server, source, "--max-tokens", "9", "--temperature", "0")
    assert code == 0
    found = results(out)
    bodies = {name: line["response"]["body"]["echo"] for name, line in found.items()}
    common = {"max_tokens": 9, "temperature": 0.0, "stream": False}
    assert bodies == {
        "a": {**PROMPT, "model": "tiny", **common},
        "7": {"messages": chat["messages"], "seed": 1, "model": "own", **common},
        "line-4": {**PROMPT, "model": "tiny", **common},
    }
    assert all(line["error"] is None for line in found.values())


def test_errors_are_result_lines(server: ApiServer, tmp_path: Path) -> None:
    server.reply = lambda body: (
        (400, {"error": {"message": "no"}}) if body["prompt"] == "bad" else (200, {})
    )
    lines = ("{", [1], {"x": 1}, {"body": 1}, {"url": "/x", "body": {}}, {"prompt": "bad"}, PROMPT)
    code, out = complete(server, write(tmp_path / "in.jsonl", *lines))
    assert code == 1
    found = results(out)
    reasons = [found[f"line-{n}"]["error"]["message"] for n in range(1, 6)]
    for reason, part in zip(
        reasons, ("not JSON", "not a JSON object", "neither", "body must", "url must"), strict=True
    ):
        assert part in reason
    assert found["line-6"]["response"]["status_code"] == 400
    assert found["line-7"]["response"]["status_code"] == 200


def test_a_line_that_is_not_utf_8(server: ApiServer, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "with a mark"}\n\xff\xfe\n')
    code, out = complete(server, source)
    assert code == 1
    assert "'utf-8' codec can't decode" in results(out)["line-2"]["error"]["message"]
    assert results(out)["line-1"]["response"]["status_code"] == 200


def test_a_pipe_is_refused_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, pipe = write(tmp_path / "in.jsonl", PROMPT), tmp_path / "pipe"
    os.mkfifo(pipe)
    for paths in ((pipe, tmp_path / "out"), (source, pipe), (tmp_path, pipe)):
        assert main(["complete", *map(str, paths)]) == 1
        assert "is not a regular file" in capsys.readouterr().err


def test_finished_lines_are_not_sent_again(server: ApiServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *({"id": n, **PROMPT} for n in range(5)))
    done = {"custom_id": "1", "response": {"status_code": 200, "body": "old"}, "error": None}
    out = write(tmp_path / "out.jsonl", done)
    with out.open("a") as file:
        file.write('{"custom_id": "2", "respo')  # an incomplete line
    assert complete(server, source)[0] == 0
    assert results(out).keys() == {"0", "1", "2", "3", "4"}
    assert results(out)["1"] == done
    assert len(server.requests) == 4
    assert complete(server, source)[0] == 0
    assert len(server.requests) == 4


def test_a_busy_server_is_retried(server: ApiServer, tmp_path: Path) -> None:
    replies = iter([(429, {}), (503, {})])
    server.reply = lambda body: next(replies, (200, {}))
    code, out = complete(server, write(tmp_path / "in.jsonl", PROMPT))
    assert code == 0
    assert len(server.requests) == 3
    assert results(out).keys() == {"line-1"}


def test_lines_remain_to_be_sent_when_the_server_goes(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda body: (503, {}) if body["prompt"] == "x" else (200, {})
    source = write(tmp_path / "in.jsonl", PROMPT, {"prompt": "x"})
    code, out = complete(server, source, "--concurrency", "1")
    assert code == 1
    assert results(out).keys() == {"line-1"}
    assert "run the same command again to resume" in capsys.readouterr().err
    server.reply = lambda body: (200, {})
    assert complete(server, source)[0] == 0
    assert results(out).keys() == {"line-1", "line-2"}


@pytest.mark.parametrize(
    ("lines", "out", "part"),
    [
        ([{"id": 1, **PROMPT}, {"id": "1", **PROMPT}], "", "lines 1 and 2 have the same id '1'"),
        ([PROMPT], "a text\n", "line 1 is not a result"),
        ([PROMPT], "a text", "its last line is not a result"),
        ([PROMPT], '{"custom_id": "z", "response": null, "error": {}}\n', "does not have"),
        ([PROMPT], '{"custom_id": "line-1", "body": {}}\n', "line 1 is not a result"),
        ([PROMPT], '{"custom_id": [1], "response": {}, "error": null}\n', "line 1 is not a result"),
        ([PROMPT], '{"custom_id": "line-1", "response": "x", "error": 1}\n', "is not a result"),
    ],
)
def test_files_that_do_not_match_are_kept(
    server: ApiServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lines: list[Any],
    out: str,
    part: str,
) -> None:
    source = write(tmp_path / "in.jsonl", *lines)
    (tmp_path / "out.jsonl").write_text(out)
    code, path = complete(server, source)
    assert code == 1
    assert part in capsys.readouterr().err
    assert path.read_text() == out
    assert not server.requests


def test_a_wrong_key_stops_with_advice(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "right"
    code, out = complete(server, write(tmp_path / "in.jsonl", PROMPT))
    assert code == 1
    assert "--api-key" in capsys.readouterr().err
    assert out.read_text() == ""


def test_missing_files_and_servers_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", PROMPT)
    out = str(tmp_path / "out.jsonl")
    assert main(["complete", str(tmp_path / "none"), out]) == 1
    assert "none" in capsys.readouterr().err
    assert main(["complete", str(source), str(source)]) == 1
    assert "is also the input file" in capsys.readouterr().err
    assert main(["complete", str(source), out, "--url", "http://127.0.0.1:9"]) == 1
    assert "pdserve up" in capsys.readouterr().err


def test_concurrency_is_bounded(server: ApiServer, tmp_path: Path) -> None:
    lock, inside, most = threading.Lock(), 0, 0
    together = threading.Barrier(3, timeout=60)

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait()
        with lock:
            inside -= 1
        return 200, {}

    server.reply = reply
    source = write(tmp_path / "in.jsonl", *[PROMPT] * 9)
    assert complete(server, source, "--concurrency", "3")[0] == 0
    assert most == 3


def test_a_run_stopped_by_ctrl_c_resumes(server: ApiServer, tmp_path: Path) -> None:
    """Requests in flight at the stop are sent again, and no line is there twice."""
    count, first = 40, threading.Semaphore(15)

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if not server.go_on.is_set() and not first.acquire(blocking=False):
            server.go_on.wait(60)
        return 200, {}

    server.reply = reply
    source = write(tmp_path / "in.jsonl", *({"id": n, **PROMPT} for n in range(count)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "pdserve.cli.main", "complete", str(source), str(out)]
    command += ["--url", server.url, "--concurrency", "4"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: out.exists() and len(results(out)) == 15, "results")
        process.send_signal(signal.SIGINT)
        assert process.stderr
        errors = process.stderr.read()
    assert process.returncode == STOPPED
    assert "15 of 40 lines" in errors
    assert "run the same command again to resume" in errors
    assert "Traceback" not in errors
    server.go_on.set()
    assert subprocess.run(command, check=False).returncode == 0
    assert results(out).keys() == {str(n) for n in range(count)}
    request = Counter(len(body) for body in server.requests)
    assert request.total() <= count + 4
