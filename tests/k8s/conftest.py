"""The scalers' simulation is an acceptance line; its modules import each other by plain names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks/k8s"))
