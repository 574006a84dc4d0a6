"""A module that ends the importing process, as a native library may."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
