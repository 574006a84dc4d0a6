"""Scraped pages as the series of `promtool test rules`, which evaluates the real alerts over them.

Time is virtual: a page covers minutes. The growth between two pages happens within a minute;
afterwards it continues at that pace, or it happened once. Gauges keep their final value.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from alerts_page import page
from prometheus_client.parser import text_string_to_metric_families

PROMTOOL = shutil.which("promtool")
PER_MINUTE = 4  # samples
HEALTHY_MINUTES = 20
INTERVAL = f"{60 // PER_MINUTE}s"
FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'
NAMED = re.compile(r'alertname="(\w+)"')

Pages = Mapping[str, str]  # text of /metrics by the role of the process
Value = tuple[float, bool]  # and whether it is a counter
Series = dict[str, Value]  # by name with labels


def needs_promtool() -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        PROMTOOL is None,
        reason="NO PROMTOOL: no alert was evaluated (Debian: apt install prometheus)",
    )


def series(pages: Pages) -> Series:
    """Return all samples, with the labels that a scrape adds."""
    found: Series = {}
    for role, text in pages.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    labels = {"job": f"pdserve-{role}", "instance": f"{role}:9090", **sample.labels}
                    counts = family.type == "counter" or sample.name.endswith(
                        ("_bucket", "_sum", "_count")
                    )
                    found[sample.name + _braces(labels)] = sample.value, counts
    return found


def _braces(labels: Mapping[str, str]) -> str:
    words = (f"{name}={_quoted(value)}" for name, value in sorted(labels.items()))
    return "{" + ",".join(words) + "}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def timeline(before: Pages, after: Pages, minutes: int, once: bool) -> list[dict[str, str]]:
    """Return twenty minutes of `before`, then the minutes of the event until `after`."""
    well, ill = series(before), series(after)
    return [
        {"series": name, "values": _values(well.get(name), ill.get(name), minutes, once)}
        for name in sorted({*well, *ill})
    ]


def _values(well: Value | None, ill: Value | None, minutes: int, once: bool) -> str:
    """Return values as promtool writes them."""
    calm, steps = HEALTHY_MINUTES * PER_MINUTE, minutes * PER_MINUTE
    first = f"_x{calm}" if well is None else f"{well[0]}x{calm - 1}"
    if ill is None:
        return f"{first} stale"  # as a scrape that fails
    value, counts = ill
    if not counts:
        return f"{first} {value}x{steps}"
    start = 0.0 if well is None else well[0]
    pace = f"{start}{(value - start) / PER_MINUTE:+}"
    if once:
        return f"{first} {pace}x{PER_MINUTE} {value}x{steps - PER_MINUTE}"
    return f"{first} {pace}x{steps}"


def firing(
    before: Pages, after: Pages, minutes: int, once: bool, folder: Path
) -> tuple[set[str], set[str]]:
    """Return the alerts that fire before, and those at the end."""
    assert PROMTOOL is not None
    looks = (HEALTHY_MINUTES - 1, HEALTHY_MINUTES + minutes - 1)
    test = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": INTERVAL,
        "tests": [
            {
                "interval": INTERVAL,
                "input_series": timeline(before, after, minutes, once),
                # The test expects no alert, so promtool prints those that fire.
                "promql_expr_test": [{"expr": FIRING, "eval_time": f"{at}m"} for at in looks],
            }
        ],
    }
    (folder / "alerts.yml").write_text(page())
    path = folder / "test.yml"
    path.write_text(json.dumps(test))
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0 or "got:" in output, output
    by_time = dict(re.findall(r"time: (\w+),\s+exp: nil\s+got: (.*)", output))
    well, ill = (set(NAMED.findall(by_time.get(_shown(at), ""))) for at in looks)
    return well, ill


def _shown(minutes: int) -> str:
    """Return a time as promtool writes it."""
    hours, rest = divmod(minutes, 60)
    return f"{hours}h{rest}m" if hours and rest else f"{hours}h" if hours else f"{rest}m"
