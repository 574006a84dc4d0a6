"""Objects that a service has loaded cost the garbage collector nothing."""

import subprocess
import sys

LOOK = """
import gc
from pdserve.services.common.process import NEW_OBJECTS, freeze_heap
before = gc.get_threshold()
freeze_heap()
assert gc.get_freeze_count() > 1000, gc.get_freeze_count()
assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
assert len(gc.get_objects()) < 100, "only what came afterwards"
"""


def test_a_frozen_heap() -> None:
    subprocess.run([sys.executable, "-c", LOOK], check=True)
