"""NVIDIA's compiler: the machine's own, or the one that pip installs."""

import importlib.util
import shutil
from functools import cache
from pathlib import Path


@cache
def nvcc() -> tuple[str, ...]:
    """Return the first words of its command line. Raises FileNotFoundError."""
    if found := shutil.which("nvcc"):
        return (found,)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for program in sorted(Path(folder).glob("*/bin/nvcc")):
            # It searches libraries in lib64, and pip has them in lib.
            return (str(program), f"-L{program.parents[1] / 'lib'}")
    raise FileNotFoundError("no nvcc: make setup installs it with the tools of the tests")
