"""Line 9: the images, built from the checkout on a Docker engine of its own: their sizes unpacked
without the model, what is left in them, and what pip-audit knows of their packages.

They stand on a Debian by debootstrap (tests/support/systems/docker_engine.py), not on the base
that the Dockerfile names."""

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
