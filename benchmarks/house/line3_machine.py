"""Line 3: the model check runs the product's request machine and finds all its seeded bugs."""

import json
import subprocess
import sys
from pathlib import Path

HANDOFF = Path(__file__).parents[1] / "handoff/line1_model.py"
BUGS = 11

done = subprocess.run([sys.executable, str(HANDOFF)], stdout=subprocess.PIPE, text=True)
figures = json.loads(done.stdout.strip().splitlines()[-1])
figures["ok"] = figures["ok"] and done.returncode == 0 and figures["bugs_found"] == BUGS
print(json.dumps(figures))
