"""Line 11: `make test` passes next to two busy loops."""

import json
import subprocess
import sys
import time

from pytest_line import ROOT, results

LOOPS = 2


def main() -> int:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
    started = time.monotonic()
    try:
        done = subprocess.run(["make", "test"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        beside = sum(loop.poll() is None for loop in loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    sys.stderr.write(done.stdout[-6000:])
    lines = done.stdout.strip().splitlines()
    figures = {
        "ok": done.returncode == 0 and beside == LOOPS and len(results(done.stdout)) == 1,
        "busy_loops": beside,
        "results": results(done.stdout),
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "seconds_of_tests": round(time.monotonic() - started),
    }
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
