"""Line 9, second part: a tenth of `make chaos` holds."""

import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).parents[1] / "handoff/line3_chaos.py"

raise SystemExit(subprocess.run([sys.executable, str(CHAOS), "--share", "0.1"]).returncode)
