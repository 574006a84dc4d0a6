"""Line 4: a layer's names occur in one module; a block, a format and a backend are one file each.

tests/engine/test_added.py writes these three at run time. Modules of architectures/ and of the GGUF
names may say the names too: they are where names of others become ours.
"""

import ast
import json
from pathlib import Path

from pytest_line import run_tests

ROOT = Path(__file__).parents[2]
NAME = "q_proj"
OTHERS = ("engine/architectures/", "engine/checkpoints/gguf/")
LEAST = 3  # tests that add something


def says(path: Path) -> bool:
    """Whether a string of the module, not its documentation, holds the name."""
    tree = ast.parse(path.read_text())
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    lone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    return any(NAME in str(n.value) for n in texts if id(n) not in lone)


def main() -> None:
    modules = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "engine").rglob("*.py"))
    saying = [m for m in modules if not m.startswith(OTHERS) and says(ROOT / m)]
    named = run_tests("tests/test_layers.py", "-k", "names_the_tensors_of_a_layer")
    added = run_tests("tests/engine/test_added.py")
    ok = len(saying) == 1 and named["ok"] and added["ok"] and added["tests"] >= LEAST
    figures = {"ok": ok, f"modules that say {NAME}": saying, "named": named, "added": added}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
