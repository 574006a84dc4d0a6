"""`pdserve bench` against a small HTTP server with known answers and times."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fakes.api_server import STALL, ApiServer, api_server, ends
from systems.eventually import wait_until

from pdserve.cli.async_client import AsyncApi
from pdserve.cli.bench import make_prompts, prompt_of_length
from pdserve.cli.http_client import ApiError
from pdserve.cli.load import open_loop
from pdserve.cli.main import main
from pdserve.cli.options import ClientSettings

TEXTS = [json.dumps({"choices": [{"text": word}]}) for word in ("a", "b", "", "c")]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        made.events = [*TEXTS, *ends(prompt_tokens=12, completion_tokens=3)]
        yield made


def bench(server: ApiServer, tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "figures.json"
    code = main(["bench", "--url", server.url, "--json", str(file), *words])
    return code, json.loads(file.read_text())


def test_a_closed_loop(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, figures = bench(server, tmp_path, "--requests", "9", "--concurrency", "3")
    assert code == 0
    assert (figures["requests"], figures["completed"]) == (9, 9)
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (9 * 12, 9 * 3)
    assert figures["ttft_ms"]["p50"] > 0
    requests = [body for body in server.requests if "max_tokens" in body]
    assert len(requests) == 10  # including a warm-up request
    assert all(body["stream"] and body["ignore_eos"] for body in requests)
    assert all(body["temperature"] == 0 for body in requests)
    assert len({body["prompt"] for body in requests}) == 10
    out = capsys.readouterr().out
    assert "tiny at http" in out
    assert "closed loop, 3 at once" in out
    assert "9 of 9 requests" in out


def test_a_seed_repeats_its_prompts(server: ApiServer, tmp_path: Path) -> None:
    """Without a seed no prompt repeats one of an earlier run, which the server may have cached."""
    requests = []
    for words in (["--random-seed", "5"], ["--random-seed", "5"], [], []):
        server.requests.clear()
        _, figures = bench(server, tmp_path, "--requests", "2", "--concurrency", "1", *words)
        requests.append([body["prompt"] for body in server.requests if "max_tokens" in body])
        assert figures["seed"] == 5 or not words
    assert requests[0] == requests[1]
    assert not set(requests[2]) & {*requests[1], *requests[3]}


def test_an_open_loop_of_chats(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--rate", "500", "--endpoint", "chat", "--no-ignore-eos", "--slo", "e2e=60s")
    code, figures = bench(server, tmp_path, "--requests", "20", *words)
    assert code == 0
    assert figures["completed"] == 20
    assert figures["slo_attainment"] == 1.0
    assert all("messages" in body for body in server.requests if "max_tokens" in body)
    assert "ignore_eos" not in server.requests[-1]
    assert "500 requests/s (Poisson)" in capsys.readouterr().out


def test_arrivals_do_not_wait_for_answers(server: ApiServer) -> None:
    """All requests are in flight while the server answers none; the seed sets the gaps."""
    server.events.insert(0, STALL)
    samples: list[Any] = []

    async def load() -> None:
        api = AsyncApi(ClientSettings(url=server.url))
        bodies = iter([b"{}"] * 12)
        run = asyncio.ensure_future(open_loop(api, "/x", bodies, 1000.0, 7, samples.append))
        await asyncio.to_thread(wait_until, lambda: len(server.requests) == 12, "requests")
        assert samples == []
        server.go_on.set()
        await run
        api.close()

    asyncio.run(load())
    assert len(samples) == 12
    assert all(sample.output_tokens == 3 for sample in samples)


def test_a_sweep_ends_at_the_rate_that_saturates(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "report.html"
    words = ("--sweep", "50:400:2", "--requests", "10", "--slo", "e2e=60s", "--html", str(html))
    code, result = bench(server, tmp_path, *words)
    assert code == 0
    rates = [run["rate"] for run in result["runs"]]
    assert rates == [50, 100, 200, 400][: len(rates)]
    assert rates
    out = capsys.readouterr().out
    assert "rate req/s tokens/s TTFT p50 p99 ITL p50 p99 failed in SLO" in " ".join(out.split())
    assert f"\n{'50':>6}" in out
    assert "100%" in out
    assert ("saturated at" in out) or len(rates) == 4
    prompts = [body["prompt"] for body in server.requests if "max_tokens" in body]
    assert len(set(prompts)) == len(prompts) == 1 + 10 * len(rates)
    text = html.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=|url\(|@import", text)

    server.events = ['{"error": {"message": "too much"}}']
    code, result = bench(server, tmp_path, "--sweep", "50,100", "--requests", "3", "--warmup", "0")
    assert code == 1
    assert [run["completed"] for run in result["runs"]] == [0]
    assert "requests failed at 50 requests/s" in capsys.readouterr().out


def test_a_server_that_dies_in_a_sweep_is_a_failure(
    server: ApiServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = server.RequestHandlerClass.stream
    num_answers = 0

    def answer_twice(handler: Any) -> None:
        nonlocal num_answers
        num_answers += 1
        stream(handler) if num_answers <= 2 else handler.send(503, {})

    monkeypatch.setattr(server.RequestHandlerClass, "stream", answer_twice)
    words = ("--sweep", "5,50", "--requests", "2", "--warmup", "0")
    code, result = bench(server, tmp_path, *words)
    assert [run["completed"] for run in result["runs"]] == [2, 0]
    assert code == 1
    assert "requests failed at 50 requests/s" in capsys.readouterr().out


def test_a_report_of_one_load_is_a_single_page(server: ApiServer, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    bench(server, tmp_path, "--requests", "5", "--html", str(html), "--model", "<tiny> & co")
    text = html.read_text()
    assert text.count("<svg") == 3
    assert "&lt;tiny&gt; &amp; co" in text
    assert "<td>5 of 5</td>" in text


def test_two_results_are_compared(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    _, figures = bench(server, tmp_path, "--requests", "4", "--concurrency", "2")
    files[0].write_text(json.dumps(figures))
    figures["ttft_ms"]["p50"] *= 2
    figures["concurrency"] = 3
    figures["temperature"] = 0.5
    files[1].write_text(json.dumps(figures))
    words = [word for file in files for word in ("--compare", str(file))]
    capsys.readouterr()
    assert main(["bench", *words]) == 0
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.startswith("time to first token, p50")]
    assert row.split()[-1] == "2.000"
    assert "differs: concurrency is 2 in A, 3 in B" in out
    assert "differs: temperature is 0.0 in A, 0.5 in B" in out
    assert "ignore_eos" in figures
    assert "warmup" in figures
    assert main(["bench", *words[:2]]) == 2
    assert "--compare needs two files" in capsys.readouterr().err
    for option in ("--json", "--html", "--sweep"):
        assert main(["bench", *words, option, "1"]) == 2
        assert f"--compare and {option} exclude each other" in capsys.readouterr().err
    for wrong in ("[]", "{}", "x", '{"runs": [{}]}'):
        files[1].write_text(wrong)
        assert main(["bench", *words]) == 2
        assert "is not a result of `pdserve bench --json`" in capsys.readouterr().err


def test_a_dataset_gives_the_requests(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data"
    words = ("--dataset", str(file), "--requests", "2", "--concurrency", "1", "--warmup", "0")
    hi = [{"role": "user", "content": "hi"}]
    file.write_text(f'{json.dumps({"messages": hi, "max_tokens": 3})}\n\n{{"prompt": "ho"}}\n')
    code, figures = bench(server, tmp_path, *words, "--endpoint", "chat")
    assert (code, figures["dataset"], figures["input_tokens"]) == (0, str(file), None)
    requests = [(body["messages"], body["max_tokens"]) for body in server.requests]
    assert requests == [(hi, 3), ([{"role": "user", "content": "ho"}], 64)]

    turns = [{"from": "gpt", "value": "no"}, {"from": "human", "value": "yes"}]
    file.write_text(json.dumps([{"conversations": []}, {"conversations": turns}]))
    server.requests.clear()
    assert bench(server, tmp_path, *words)[0] == 0
    assert [body["prompt"] for body in server.requests] == ["yes", "yes"]  # repeated

    capsys.readouterr()
    for text, message in (
        ("", "has no requests"),
        ("[{}]", "entry 0: needs `conversations`"),
        ("{}", "line 1: needs a prompt"),
        ('{"prompt": "a"}\n[', "line 2: not JSON"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens must be"),
        ('{"messages": [{}]}', "has messages; add --endpoint chat"),
    ):
        file.write_text(text)
        assert main(["bench", "--url", server.url, *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("letters", [1, 4, 100])
def test_prompts_have_the_right_length_with_any_tokenizer(letters: int) -> None:
    """A word has one token per `letters` letters."""

    async def tokens(text: str) -> int:
        words = text.split() if letters > 1 else [text]
        return 1 + sum(-(-len(word) // letters) for word in words)

    for num_tokens in (8, 33, 128, 1000):
        for seed in range(20):
            text = asyncio.run(prompt_of_length(Random(seed), num_tokens, tokens))
            assert asyncio.run(tokens(text)) == num_tokens


def test_prompts_have_the_requested_number_of_tokens(server: ApiServer) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        words = body["prompt"].split()  # a word with an "a" has two tokens, and one begins the text
        return 200, {"count": 1 + len(words) + sum("a" in word for word in words)}

    server.reply = reply

    async def make(count: int, tokens: int) -> tuple[list[str], bool]:
        api = AsyncApi(ClientSettings(url=server.url))
        try:
            return await make_prompts(api, "m", count, tokens, seed=1)
        finally:
            api.close()

    prompts, exact = asyncio.run(make(5, 50))
    assert exact
    assert {reply({"prompt": prompt})[1]["count"] for prompt in prompts} == {50}
    assert len(set(prompts)) == 5
    with pytest.raises(ApiError, match="--input-tokens"):
        asyncio.run(make(1, 1))
    server.reply = lambda body: (404, {})
    prompts, exact = asyncio.run(make(2, 30))
    assert not exact
    assert all(len(prompt.split()) == 30 for prompt in prompts)


def test_failed_requests_are_reported(
    server: ApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--requests", "3", "--warmup", "0")
    server.reply = lambda body: (
        (200, {"count": 128}) if "stream" not in body else (429, {"error": {"message": "too many"}})
    )
    code, figures = bench(server, tmp_path, *words)
    assert code == 1
    assert figures["errors"] == {"too many": 3}
    assert "3 failed: too many" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--rate", "1", "--concurrency", "2"], 2, "--rate and --concurrency"),
        (["--json", "/none/x"], 2, "--json: "),
        (["--slo", "speed=1"], 2, "--slo: 'speed=1' is not a valid bound"),
        (["--url", "http://127.0.0.1:9"], 1, "pdserve up"),
        (["--url", "ftp://x"], 1, "is not the URL"),
        (["--input-token", "3"], 2, "did you mean --input-tokens"),
    ],
)
def test_invalid_options_are_named_in_the_error(
    words: list[str], code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == code
    err = capsys.readouterr().err
    assert part in err
    assert "Traceback" not in err


def test_ctrl_c_shows_the_measurements_so_far(server: ApiServer) -> None:
    server.events = [*TEXTS, *ends(prompt_tokens=12, completion_tokens=3)]
    command = [sys.executable, "-m", "pdserve.cli.main", "bench", "--url", server.url]
    command += ["--requests", "100000", "--warmup", "0", "--input-tokens", "2", "--rate", "5"]
    server.models = [{"id": "tiny"}]
    server.reply = lambda body: (404, {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: bool(server.requests), "the look for /tokenize")
        server.reply = None
        wait_until(lambda: len(server.requests) >= 3, "requests")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert b"requests in" in out
    assert b"Traceback" not in err
