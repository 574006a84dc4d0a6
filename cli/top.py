"""`pdserve top` shows the workers of a running server, refreshed until the user presses q.

The figures come from the gateway's /metrics; rates are computed from the changes between two
snapshots.
"""

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.http_client import ApiClient, ApiError, client_of
from pdserve.cli.options import Settings, TopSettings

# (width of the bar, gap between columns); the first layout that fits is used.
LAYOUTS = ((12, 2), (12, 1), (6, 1), (0, 1))
HEAD = (
    *("role", "address", "state", "run", "wait", "KV in use"),
    *("used", "cached", "free", "hits", "KV MB/s", "model"),
)
LEFT_ALIGNED = ("role", "address", "state", "KV in use", "model")  # left-aligned columns
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # alternate screen, no cursor
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
WAIT_S = 5.0  # timeout of a response
ENDS = (b"q", b"Q", b"\x03", b"\x04")  # q, Ctrl-C, Ctrl-D
BLOCK_STATES = ("used", "reserved", "cached", "free", "total")


@dataclass(slots=True)
class WorkerStats:
    """The figures of one worker in a snapshot; counters count from the worker's start."""

    role: str = ""
    model: str = ""
    address: str = ""
    state: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    transfer_bytes: float = 0.0
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BLOCK_STATES, 0))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures in the gateway's /metrics at one time; counters count from the gateway's
    start."""

    workers: Mapping[str, WorkerStats]
    requests: Mapping[str, int]  # in the gateway, by state
    output_tokens: float
    prompt_tokens: float
    ended: float
    failures: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second, computed from two snapshots."""

    output_tokens: float = 0.0
    prompt_tokens: float = 0.0
    requests: float = 0.0
    transfer_bytes: Mapping[str, float] = field(default_factory=dict)  # by worker


_WORKER_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
}


def parse_snapshot(text: str) -> Snapshot:
    """Parse the text of /metrics. Raises ValueError if it is not in Prometheus' format, KeyError if
    a sample lacks a label."""
    workers: defaultdict[str, WorkerStats] = defaultdict(WorkerStats)
    requests: dict[str, int] = {}
    sums: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels, name, value = sample.labels, sample.name, sample.value
            if name == "pdserve_gateway_requests":
                requests[labels["state"]] = int(value)
            elif "worker" in labels:
                _add_sample(workers[labels["worker"]], name, labels, value)
            else:
                sums[name] += value
    return Snapshot(
        dict(workers),
        requests,
        # Each output token counts in one of the two histograms.
        output_tokens=sums["vllm:time_to_first_token_seconds_count"]
        + sums["vllm:inter_token_latency_seconds_count"],
        prompt_tokens=sums["vllm:prompt_tokens_total"],
        ended=sums["vllm:e2e_request_latency_seconds_count"],
        failures=sums["pdserve_request_failures_total"],
    )


def _add_sample(worker: WorkerStats, name: str, labels: Mapping[str, str], value: float) -> None:
    worker.address = labels["worker"]
    if name in _WORKER_GAUGES:
        kind = type(getattr(worker, _WORKER_GAUGES[name]))
        setattr(worker, _WORKER_GAUGES[name], kind(value))
    elif name == "pdserve_worker_silent_seconds":
        worker.role, worker.model = labels["role"], labels["model_name"]
        worker.state = labels["state"]
    elif name == "pdserve_kv_blocks":
        worker.blocks[labels["state"]] = int(value)
    elif name == "pdserve_transfer_bytes_total":
        worker.transfer_bytes += value


def rates(previous: Snapshot, current: Snapshot, seconds: float) -> Rates:
    """Compute the rates between two snapshots that are `seconds` apart; 0 for a counter that has
    fallen, because its process restarted."""

    def per_s(old: float, new: float) -> float:
        return max(0.0, new - old) / seconds

    return Rates(
        per_s(previous.output_tokens, current.output_tokens),
        per_s(previous.prompt_tokens, current.prompt_tokens),
        per_s(previous.ended, current.ended),
        {
            name: per_s(previous.workers[name].transfer_bytes, worker.transfer_bytes)
            for name, worker in current.workers.items()
            if name in previous.workers
        },
    )


def screen(url: str, snapshot: Snapshot, rates: Rates | None, columns: int = 120) -> list[str]:
    """Return the lines of text to show for a snapshot, at most `columns` wide if possible. Without
    `rates` (there is no earlier snapshot), dashes take the place of the rates."""
    models = {worker.model for worker in snapshot.workers.values()}
    running = sum(worker.running for worker in snapshot.workers.values())
    waiting = sum(worker.waiting for worker in snapshot.workers.values())
    request_counts = (
        ", ".join(f"{count} {state}" for state, count in snapshot.requests.items()) or "none"
    )
    lines = [
        f"{url}: {_workers(len(snapshot.workers))}{_model_suffix(models)}",
        f"{running} running, {waiting} waiting; in the gateway: {request_counts}",
        _speeds(rates),
        f"{snapshot.failures:.0f} failed or stopped so far",
        "",
    ]
    if not snapshot.workers:
        return [*lines, "no worker has joined"]
    order = sorted(snapshot.workers.values(), key=lambda w: (w.model, w.role, w.address))
    for bar, gap in LAYOUTS:
        rows = [HEAD, *(_row(worker, rates, bar) for worker in order)]
        table_lines = table([row[:-1] for row in rows] if len(models) == 1 else rows, gap)
        if max(map(len, table_lines)) <= columns:
            break
    return lines + table_lines


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _model_suffix(models: Collection[str]) -> str:
    """Return " of MODEL" for the headline if all workers have the same model, so that the table
    needs no column for it; otherwise ""."""
    return f" of {next(iter(models))}" if len(models) == 1 else ""


def _row(worker: WorkerStats, rates: Rates | None, bar: int) -> tuple[str, ...]:
    filled = round(min(1.0, worker.kv_usage) * bar)
    hits = f"{worker.prefix_hits / worker.prefix_queries:.0%}" if worker.prefix_queries else "-"
    transfer_rate = rates.transfer_bytes.get(worker.address) if rates else None
    blocks = worker.blocks
    return (
        worker.role,
        worker.address,
        worker.state,
        str(worker.running),
        str(worker.waiting),
        f"{'█' * filled}{'░' * (bar - filled)} {worker.kv_usage:4.0%}".lstrip(),
        str(blocks["used"] + blocks["reserved"]),
        str(blocks["cached"]),
        str(blocks["free"]),
        hits,
        "-" if transfer_rate is None else f"{transfer_rate / 1e6:.1f}",
        worker.model,
    )


def table(rows: Sequence[Sequence[str]], gap: int) -> list[str]:
    """Format rows of cells as lines with aligned columns, which are `gap` spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * gap)
        .join(
            cell.ljust(width) if name in LEFT_ALIGNED else cell.rjust(width)
            for name, cell, width in zip(HEAD, row, widths, strict=False)
        )
        .rstrip()
        for row in rows
    ]


def _speeds(rates: Rates | None) -> str:
    if rates is None:
        return "output - tokens/s, prompts - tokens/s, - requests/s"
    return (
        f"output {rates.output_tokens:.1f} tokens/s, prompts {rates.prompt_tokens:.1f} tokens/s, "
        f"{rates.requests:.1f} requests/s"
    )


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Run `pdserve top`: show the view until a key ends it, or once if not on a terminal. Returns
    the exit code. Raises ApiError if the server does not respond at the start."""
    options = settings.build(TopSettings)
    client = client_of(options, timeout_s=WAIT_S)
    first = fetch_snapshot(client)
    if options.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("\n".join(screen(client.url, first, None)))
        return 0
    with raw_terminal(), suppress(KeyboardInterrupt):
        watch(client, first, options.interval_s)
    return 0


def fetch_snapshot(client: ApiClient) -> Snapshot:
    """Read the gateway's /metrics. Raises ApiError if the server does not respond, or not with
    pdserve's metrics."""
    try:
        return parse_snapshot(client.get("/metrics?fleet=true").decode())
    except (ValueError, KeyError) as error:
        raise ApiError(
            f"{client.url}/metrics does not return pdserve's metrics: {error}", 502
        ) from None


def watch(client: ApiClient, previous: Snapshot, interval_s: float) -> None:
    """Redraw the view every `interval_s` until the user presses a key that ends it. While the
    server is unreachable, shows the error and retries."""
    previous_at = time.monotonic()
    draw([*screen(client.url, previous, None, columns()), "", "press q to quit"])
    while not key_within(interval_s):
        try:
            current = fetch_snapshot(client)
        except ApiError as error:
            draw([f"{client.url}: {error}", "", "retrying; press q to quit"])
            continue
        current_at = time.monotonic()
        lines = screen(
            client.url, current, rates(previous, current, current_at - previous_at), columns()
        )
        draw([*lines, "", "press q to quit"])
        previous, previous_at = current, current_at


def key_within(seconds: float) -> bool:
    """Wait for at most `seconds`; return whether the user has pressed a key that ends the view."""
    deadline = time.monotonic() + seconds
    while (remaining_s := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], remaining_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if not key or key in ENDS:
                return True
    return False


def columns() -> int:
    return shutil.get_terminal_size().columns


def draw(lines: list[str]) -> None:
    """Draw lines on the terminal from the top; what does not fit is cut off."""
    width, rows = shutil.get_terminal_size()
    visible_lines = [line[:width] + CLEAR_LINE for line in lines[: rows - 1]]
    sys.stdout.write(HOME + "\r\n".join(visible_lines) + CLEAR_REST)
    sys.stdout.flush()


@contextmanager
def raw_terminal() -> Iterator[None]:
    """A context in which keys are read one by one and not shown; the terminal's previous screen is
    restored at the end."""
    saved_attributes = termios.tcgetattr(sys.stdin)
    sys.stdout.write(ENTER)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved_attributes)
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
