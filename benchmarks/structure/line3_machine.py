"""Line 3: the stage of a router's request is written in one module, which the model check runs.

machine: tests that no other module writes it, and of the machine under any events. model: tests
that the model check has no separate rule for the router. The check itself covers its whole space
and finds every seeded bug.
"""

import json
import subprocess
import sys
from pathlib import Path

from pytest_line import run_tests

HANDOFF = Path(__file__).parents[1] / "handoff/line1_model.py"
BUGS = 11


def main() -> None:
    done = subprocess.run([sys.executable, str(HANDOFF)], stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    figures["machine"] = run_tests("tests/services/router/test_router_machine.py")
    figures["model"] = run_tests("tests/engine/handoff/test_model.py")
    figures["ok"] = (
        figures["ok"]
        and done.returncode == 0
        and figures["bugs_found"] == BUGS
        and figures["machine"]["ok"]
        and figures["model"]["ok"]
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
