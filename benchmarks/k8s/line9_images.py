"""Line 9: the images, built from the checkout on a separate Docker engine: their unpacked sizes
without the model, their contents, and the vulnerabilities that pip-audit reports for their
packages.

They are based on a Debian by debootstrap (tests/support/systems/docker_engine.py), not on the base
that the Dockerfile names.
"""

import json
import sys

from pytest_line import run_tests, skips_said
from systems.docker_engine import missing

if reason := missing():
    figures = {"ok": True, "skipped": reason}
else:
    figures = skips_said(run_tests("tests/compose/test_images.py", "-m", "compose"))
print(json.dumps(figures))
sys.exit(0 if figures["ok"] else 1)
