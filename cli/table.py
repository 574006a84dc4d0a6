"""Formats rows of text as a table with aligned columns."""

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table as lines, the first of which has the names of the columns."""
    lines = [columns, *rows]
    widths = [max(len(row[n]) for row in lines) for n in range(len(columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in lines
    )
