"""A module that ends the process which imports it, as a native library may."""

import os

os._exit(1)
