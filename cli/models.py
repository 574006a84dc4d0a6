"""`pdserve models` prints the models of a running server."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.cli.http_client import client_of
from pdserve.cli.options import ClientSettings, Settings

COLUMNS = {
    "model": "id",
    "architecture": "architecture",
    "context": "max_model_len",
    "weights": "quantization",
    "KV identity": "kv_identity",
    "numerics": "numerics_id",
}
SHORT = 12  # hex digits of an identity


def run(settings: Settings, positionals: Mapping[str, str]) -> int:
    """Print a table of the server's models; return the exit code. Raises ApiError if the server
    does not respond."""
    print(table(client_of(settings.build(ClientSettings), timeout_s=10.0).models()), end="")
    return 0


def table(models: Sequence[Mapping[str, Any]]) -> str:
    """Format models as a table with aligned columns; a dash marks a value that the server does not
    report."""
    rows = [list(COLUMNS)]
    for model in models:
        cells = {key: str(model.get(key) or "-") for key in COLUMNS.values()}
        cells["kv_identity"] = cells["kv_identity"][:SHORT]
        rows.append(list(cells.values()))
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)
    return "\n".join(lines) + "\n"
