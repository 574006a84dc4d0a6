"""Line 5: `docker compose up` answers a chat request; both Kubernetes overlays validate."""

import json

from pytest_line import run_tests

compose, k8s = run_tests("tests/compose", "-m", "compose or not compose"), run_tests("tests/k8s")
print(json.dumps({"ok": compose["ok"] and k8s["ok"], "compose": compose, "k8s": k8s}))
