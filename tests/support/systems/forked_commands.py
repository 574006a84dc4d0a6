"""Command lines that run without some packages.

Each runs in a fork of one process that has imported their code, since the import takes longer than
all of them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

_PROGRAM = """
import importlib, json, os, sys
missing, module, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
importlib.import_module(module)
from pdserve.cli.main import main
for lacking, words in commands:
    if not os.fork():
        sys.modules.update(dict.fromkeys(lacking))
        sys.exit(main(words))
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(f"<exit {code}>", file=sys.stderr, flush=True)
"""


def run_without(
    packages: Iterable[str],
    module: str,
    commands: Sequence[tuple[Iterable[str], Sequence[str]]],
    **environ: str,
) -> list[tuple[int, str]]:
    """Return the exit code and the standard error of each command. `module`: what the process
    imports without `packages`. A command is the packages that it lacks besides, and its words."""
    arguments = json.dumps(
        ([*packages], module, [([*lacking], [*words]) for lacking, words in commands])
    )
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )
    assert "Traceback" not in done.stderr, done.stderr
    results = re.findall(r"(.*?)<exit (\d+)>\n", done.stderr, re.DOTALL)
    assert (done.returncode, len(results)) == (0, len(commands)), done.stderr
    return [(int(code), text) for text, code in results]
