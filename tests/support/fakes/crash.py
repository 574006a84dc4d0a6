"""A module that ends the process which imports it, as a native library may."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
