"""Make the scalers' simulation importable: it is a benchmark, and its modules import each other by
bare names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/k8s"))
