"""The lines of `pdserve top`. Pure."""

from collections.abc import Collection, Sequence

from pdserve.services.cli.top.fleet import Rates, Snapshot, WorkerStats

BAR = 12  # columns
HEAD = (
    *("role", "address", "state", "run", "wait", "KV in use"),
    *("used", "cached", "free", "hits", "KV MB/s", "model"),
)
LEFT = ("role", "address", "state", "KV in use", "model")  # aligned so


def screen(url: str, now: Snapshot, rates: Rates | None) -> list[str]:
    """What is shown; without rates (there was no snapshot before) they are dashes."""
    models = {worker.model for worker in now.workers.values()}
    running = sum(worker.running for worker in now.workers.values())
    waiting = sum(worker.waiting for worker in now.workers.values())
    here = ", ".join(f"{count} {state}" for state, count in now.requests.items()) or "none"
    lines = [
        f"{url}: {_workers(len(now.workers))}{_of(models)}, {running} running, {waiting} waiting; "
        f"in the gateway: {here}",
        f"{_speeds(rates)}; {now.failures:.0f} failed or stopped so far",
        "",
    ]
    if not now.workers:
        return [*lines, "no worker has joined"]
    order = sorted(now.workers.values(), key=lambda w: (w.model, w.role, w.address))
    rows = [HEAD, *(_row(worker, rates) for worker in order)]
    return lines + table([row[:-1] for row in rows] if len(models) == 1 else rows)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _of(models: Collection[str]) -> str:
    """One model for all is no column."""
    return f" of {next(iter(models))}" if len(models) == 1 else ""


def _row(worker: WorkerStats, rates: Rates | None) -> tuple[str, ...]:
    filled = round(min(1.0, worker.kv_usage) * BAR)
    hits = f"{worker.prefix_hits / worker.prefix_queries:.0%}" if worker.prefix_queries else "-"
    moved = rates.transfer_bytes.get(worker.address) if rates else None
    blocks = worker.blocks
    return (
        worker.role,
        worker.address,
        worker.state,
        str(worker.running),
        str(worker.waiting),
        f"{'█' * filled}{'░' * (BAR - filled)} {worker.kv_usage:4.0%}",
        str(blocks["used"] + blocks["reserved"]),
        str(blocks["cached"]),
        str(blocks["free"]),
        hits,
        "-" if moved is None else f"{moved / 1e6:.1f}",
        worker.model,
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(HEAD, row, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def _speeds(rates: Rates | None) -> str:
    if rates is None:
        return "output - tokens/s, prompts - tokens/s, - requests/s"
    return (
        f"output {rates.output_tokens:.1f} tokens/s, prompts {rates.prompt_tokens:.1f} tokens/s, "
        f"{rates.requests:.1f} requests/s"
    )
