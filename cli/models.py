"""`pdserve models` prints the models of a running server."""

from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.cli.http_client import client_of
from pdserve.cli.options import ClientSettings, Settings
from pdserve.cli.table import table

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
    models = client_of(settings.build(ClientSettings), timeout_s=10.0).models()
    print(table(tuple(COLUMNS), rows_of(models)), end="")
    return 0


def rows_of(models: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of the table for each model; a dash marks a value that the server does not
    report."""
    rows = []
    for model in models:
        cells = {key: str(model.get(key) or "-") for key in COLUMNS.values()}
        cells["kv_identity"] = cells["kv_identity"][:SHORT]
        rows.append(list(cells.values()))
    return rows
