"""Line 1: a scripted conversation of each client library with a running system: streaming, tools
and JSON schemas, with separate prefill and in one worker. The libraries are installed into a
separate virtual environment."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from systems.fleet import Fleet

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
PYTHON = ROOT / "build/clients/bin/python"
NODE_FOLDER = ROOT / "build/npm"
LIBRARIES = (
    "openai", "anthropic", "langchain-openai", "instructor", "pydantic-ai-slim[openai]", "llm",
    "litellm",
)  # fmt: skip
MODEL, KEY = "SmolLM2-135M-Instruct", "a-key"
FORMS = {"prefill apart": ("--prefill", "1", "--decode", "1"), "one worker": ("--prefill", "0")}


def install() -> None:
    """Install the current releases from the registries: users do not pin these clients."""
    if not PYTHON.exists():
        venv.create(PYTHON.parents[1], with_pip=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", *LIBRARIES], check=True)
    NODE_FOLDER.mkdir(parents=True, exist_ok=True)
    if shutil.which("npm"):
        subprocess.run(["npm", "install", "--silent", "openai"], cwd=NODE_FOLDER, check=True)


def versions() -> dict[str, str]:
    names = [library.split("[")[0] for library in LIBRARIES]
    code = (
        f"import importlib.metadata as m, json; print(json.dumps([m.version(n) for n in {names}]))"
    )
    found = subprocess.run([PYTHON, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(names, json.loads(found.stdout), strict=True))


def conversation_json() -> str:
    code = "import conversation as c, json; print(json.dumps({n: getattr(c, n) for n in dir(c)"
    code += " if n in ('WEATHER', 'CITY', 'QUESTION')}))"
    found = subprocess.run(
        [PYTHON, "-c", code], check=True, capture_output=True, text=True, cwd=CLIENTS
    )
    return found.stdout


def talk(words: list[str], env: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return {"ok": False, "error": done.stderr[-500:]}


def conversations(url: str) -> dict[str, dict[str, Any]]:
    """The results of each script, by client."""
    found: dict[str, dict[str, Any]] = {}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = own | {"BASE_URL": url, "MODEL": MODEL, "API_KEY": KEY}
    for script in sorted(CLIENTS.glob("talk_*.py")):
        found[script.stem.removeprefix("talk_")] = talk([str(PYTHON), str(script)], env)
    if shutil.which("node"):
        script = NODE_FOLDER / "talk_openai.mjs"  # next to the modules that it imports
        shutil.copy(CLIENTS / script.name, script)
        conversation = {"CONVERSATION": conversation_json()}
        found["openai (npm)"] = talk(["node", str(script)], env | conversation)
    else:
        found["openai (npm)"] = {"ok": True, "skipped": "no node"}
    return found


def main() -> None:
    install()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, form in FORMS.items():
        with Fleet(*form, "--kv-tokens", "16384", "--api-key", KEY) as fleet:
            found[name] = conversations(fleet.url)
    ok = all(client["ok"] for clients in found.values() for client in clients.values())
    print(json.dumps({"ok": ok, "versions": versions(), **found}))
    sys.exit(not ok)


if __name__ == "__main__":
    main()
