"""Make the modules of the harness importable by their plain names, as for scripts of one folder."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / f"benchmarks{part}") for part in ("/cpu", "/gpu", "/scale", "/k8s", "")]
