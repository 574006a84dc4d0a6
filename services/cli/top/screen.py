"""The lines of `pdserve top`. Pure."""

from collections.abc import Collection, Sequence

from pdserve.services.cli.top.fleet import Rates, Snapshot, WorkerStats

# (width of the bar, gap between columns); the first layout that fits is used.
LAYOUTS = ((12, 2), (12, 1), (6, 1), (0, 1))
HEAD = (
    *("role", "address", "state", "run", "wait", "KV in use"),
    *("used", "cached", "free", "hits", "KV MB/s", "model"),
)
LEFT_ALIGNED = ("role", "address", "state", "KV in use", "model")  # left-aligned columns


def screen(url: str, snapshot: Snapshot, rates: Rates | None, columns: int = 120) -> list[str]:
    """The lines to show, within `columns` if possible; without `rates` (no earlier snapshot) they
    are dashes."""
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
    """The model's name if all workers have the same, which then needs no column."""
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
    """Aligned columns, `gap` spaces apart."""
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
