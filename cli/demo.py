"""`pdserve demo` asks a model a short and a long question with each KV transport, and verifies by
which worker each prompt is computed.

It starts a system by `pdserve up` and uses its HTTP API like any client. For each prompt, the
gateway's log and its metrics must agree on where it was computed: by the decode worker, or by a
prefill worker.
"""

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pdserve.cli.http_client import ApiClient, ApiError
from pdserve.cli.options import Settings

TRANSPORTS = ("tcp", "shm")
START_S = 120.0
SETTLE_S = 10.0  # time for a worker's last load report to reach the metrics
SHORT = "Name the capital of France."
LONG_TOKENS = 600
SENTENCE = "The quick brown fox jumps over the lazy dog near the old river bank. "
QUESTION = " Which animal jumps over the dog?"

Metrics = Mapping[str, float]


class DemoError(Exception):
    """Raised if the system does not start or stop as expected, or if a response, the log or the
    metrics are not as expected."""


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run the demo. Returns 0 if every question was answered and log and metrics agree; 1
    otherwise."""
    try:
        for transport in TRANSPORTS:
            with system(transport) as (client, log):
                show(transport, client, log)
    except (DemoError, ApiError) as error:
        print(f"\ndemo failed: {error}", file=sys.stderr)
        return 1
    print("\ndemo passed: log and metrics agree, and all processes have stopped")
    return 0


@contextmanager
def system(transport: str) -> Iterator[tuple[ApiClient, Path]]:
    """Run `pdserve up` on a free port during the block; yields a client of it and the path of its
    log. Raises DemoError if it ends with an error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "pdserve.cli.main", "up", "--port", str(port)]
    command += ["--kv-transport", transport, "--remote-prefill", "auto", "--log-format", "text"]
    with tempfile.TemporaryDirectory(prefix="pdserve-demo-") as folder:
        log = Path(folder) / "log"
        with (
            log.open("wb") as out,
            subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL) as up,
        ):
            try:
                client = ApiClient(f"http://127.0.0.1:{port}")
                wait_ready(up, log)
                yield client, log
            finally:
                up.terminate()
                code = up.wait(60)
        if code:
            raise DemoError(f"pdserve up ended with exit code {code}:\n{tail(log)}")


def wait_ready(up: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the log of `pdserve up` says that it is ready. Raises DemoError if the process
    ends before that, or if it takes longer than START_S."""

    def is_ready() -> bool:
        if up.poll() is not None:
            raise DemoError(f"pdserve up exited before it was ready:\n{tail(log)}")
        return "pdserve is ready" in log.read_text(errors="replace")

    wait_until(is_ready, START_S, lambda: f"not ready after {START_S:g} s:\n{tail(log)}")


def wait_until(
    condition: Callable[[], bool], limit_s: float, describe_failure: Callable[[], str]
) -> None:
    """Wait until the condition is true. Raises DemoError, with the text from `describe_failure`, if
    that takes longer than `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(describe_failure())
        time.sleep(0.1)


def show(transport: str, client: ApiClient, log: Path) -> None:
    """Ask the short and the long question on a system with this transport, and verify where they
    are computed. Raises DemoError or ApiError if something is not as expected."""
    model = str(client.get_json("/v1/models")["data"][0]["id"])
    print(f"\n{model}, KV over {transport}")
    ask(client, log, model, "short", SHORT, "local")
    ask(client, log, model, "long", long_question(client, model), transport)


def long_question(client: ApiClient, model: str) -> str:
    """Make a question of at least LONG_TOKENS tokens, as the server's tokenizer counts them."""
    num_tokens = int(client.post_json("/tokenize", {"model": model, "prompt": SENTENCE})["count"])
    return SENTENCE * -(-LONG_TOKENS // max(1, num_tokens - 1)) + QUESTION


def ask(client: ApiClient, log: Path, model: str, name: str, question: str, expected: str) -> None:
    """Ask one question, print the answer, and verify where its prompt was computed. `expected` is
    "local" for the decode worker, or the transport by which a prefill worker must have sent the
    KV."""
    metrics_before = metrics(client)
    started = time.monotonic()
    message = {"role": "user", "content": question}
    answer = client.post_json(
        "/v1/chat/completions",
        {"model": model, "messages": [message], "max_tokens": 20, "temperature": 0},
    )
    seconds = time.monotonic() - started
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    prefill_at = read_prefill_at(log, answer["id"])
    print(
        f"  {name}: {usage['prompt_tokens']} prompt tokens, prefilled {place(prefill_at)}, "
        f"{seconds:.2f} s\n    {' '.join(text.split())!r}"
    )
    if not text.strip():
        raise DemoError(f"the answer to the {name} question is empty")
    if prefill_at != expected:
        raise DemoError(
            f"the log says that the {name} prompt was prefilled {prefill_at}, not {expected}"
        )
    check_metrics(client, metrics_before, name, expected)


def place(prefill_at: str) -> str:
    return "by the decode worker" if prefill_at == "local" else f"remotely over {prefill_at}"


def read_prefill_at(log: Path, request: str) -> str:
    """Return where a request's prompt was computed, from the gateway's log: "local" or a transport.
    Raises DemoError if the log does not say so within SETTLE_S."""
    places: list[str] = []

    def is_logged() -> bool:
        lines = [line for line in log.read_text(errors="replace").splitlines() if request in line]
        places.extend(place for line in lines for place in re.findall(r"prefill_at=(\S+)", line))
        return bool(places)

    wait_until(is_logged, SETTLE_S, lambda: f"the log has no line for request {request}")
    return places[0]


def check_metrics(client: ApiClient, metrics_before: Metrics, name: str, expected: str) -> None:
    """Verify by the metrics that exactly one more prompt was computed, at the expected place, and
    that KV was transferred only if that is a prefill worker. Raises DemoError otherwise."""
    label = "local" if expected == "local" else "remote"
    counts: dict[str, float] = {}
    sent = 0.0

    def is_as_expected() -> bool:
        nonlocal sent
        now = metrics(client)
        deltas = {key: value - metrics_before.get(key, 0.0) for key, value in now.items()}
        for kind in ("local", "remote"):
            counts[kind] = deltas.get(f'pdserve_prefill_requests_total{{where="{kind}"}}', 0.0)
        sent = sum(
            value
            for key, value in deltas.items()
            if key.startswith("pdserve_transfer_bytes_total") and f'transport="{expected}"' in key
        )
        is_remote = label == "remote"
        expected_counts = {"local": float(not is_remote), "remote": float(is_remote)}
        return counts == expected_counts and (sent > 0) == is_remote

    wait_until(
        is_as_expected,
        SETTLE_S,
        lambda: f"unexpected /metrics after the {name} question: {counts} prefills, {sent:g} bytes",
    )
    print(f"    /metrics: {label} +1, {sent / 1e6:.1f} MB of KV sent and received")


def metrics(client: ApiClient) -> Metrics:
    """Read the gateway's metrics; return the value of each sample by its name with labels."""
    samples: dict[str, float] = {}
    for line in client.get("/metrics").decode().splitlines():
        key, _, value = line.rpartition(" ")
        if key and not line.startswith("#"):
            samples[key] = float(value)
    return samples


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
