"""Line 6: all parts of `make accept-gpu` run on a CPU, interpreted, in three minutes at most."""

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

MOST_S = 180.0

with TemporaryDirectory() as folder:
    out, started = Path(folder) / "fake.json", time.monotonic()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run.py")), "--fake", "--out", str(out)],
        stdout=sys.stderr,
    )
    seconds = time.monotonic() - started
    found = json.loads(out.read_text())
ok = done.returncode == 0 and seconds <= MOST_S
print(json.dumps({"ok": ok, "seconds": round(seconds), "fake": found}))
