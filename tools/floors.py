"""Write pip's requirements and constraints for the lowest versions that pyproject.toml allows.

    python tools/floors.py FOLDER

Each package that `dependencies` or an extra of EXTRAS names has exactly its lower bound. All other
packages, including those that only tests need, have at most their version in constraints.txt.
"""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("postgres", "redis", "mcp", "trace")  # torch and cuda take gigabytes
# Tools that no test of the gateway or the services uses.
UNUSED = re.compile(
    "build|cupy|nvidia|mypy|ruff|types-|cmake|pytest-cov|kubernetes|cloudcoil|helm|mkdocs|pillow"
)


def lower_bounds(requirements: list[str]) -> dict[str, tuple[Requirement, str]]:
    """Return the requirement and its lower bound, by package. Raises ValueError if a requirement
    is not of the form `NAME>=VERSION`."""
    bounds = {}
    for line in requirements:
        requirement = Requirement(line)
        (bound, *others) = requirement.specifier
        if bound.operator != ">=" or others:
            raise ValueError(f"{line}: expected a lower bound alone")
        bounds[canonicalize_name(requirement.name)] = requirement, bound.version
    return bounds


def main() -> None:
    folder = Path(sys.argv[1])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    floors = lower_bounds(sum((extras[name] for name in EXTRAS), project["dependencies"]))
    requirements = ["torch"]
    for requirement, version in floors.values():
        features = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
        requirements.append(f"{requirement.name}{features}=={version}")
    requirements += [
        line
        for line in extras["test"]
        if not UNUSED.match(line) and canonicalize_name(Requirement(line).name) not in floors
    ]
    constraints = []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name, _, version = line.partition("==")
        if version and canonicalize_name(name) not in floors:
            constraints.append(f"{name}<={version}")
    for name, lines in (("requirements", requirements), ("constraints", constraints)):
        (folder / f"{name}.txt").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
