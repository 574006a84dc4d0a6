"""The harness's modules import each other by their plain names, as scripts of one folder do."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [
    str(ROOT / f"benchmarks{part}")
    for part in ("/cpu", "/handoff", "/structure", "/api", "/gpu", "/scale", "/k8s", "")
]
