"""Modules of the pages that need no browser, in Node.js: files in messages, search, export."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pdserve.gateway.web import pages

NODE = shutil.which("node")
ASSETS = Path(pages.__file__).parent / "assets"
MODULES = ("user_text.js", "search.js", "export.js")
WHALE = {
    "title": "Animals & more",
    "messages": [
        {"role": "user", "content": "Which is the largest?", "files": [
            {"name": "list.md", "text": "elephant\n```\nwhale\n```"},
        ]},
        {"role": "assistant", "content": "The blue\nwhale.", "reasoning": "Sizes.\n\nCompare.",
         "model": "tiny", "tool_calls": [
             {"name": "size", "arguments": '{"of": "whale"}', "result": "30 m"},
         ], "error": "It stopped."},
    ],
}  # fmt: skip
MARKDOWN = """# Animals & more

## You

list.md
````
elephant
```
whale
```
````

Which is the largest?

## tiny

> Sizes.
>
> Compare.

The blue
whale.

Call of the tool size
```
{"of": "whale"}
```

Result
```
30 m
```

Error: It stopped.
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node.js")
def test_modules_without_a_browser(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """One process for all cases, since each takes a while to start."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    for name in MODULES:
        shutil.copy(ASSETS / name, tmp_path)
    empty = {"title": "", "messages": []}
    cases: dict[str, tuple[str, str, list[Any], Any]] = {
        "a file before the text": ("user_text.js", "userText", [WHALE["messages"][0]],
            "list.md\n````\nelephant\n```\nwhale\n```\n````\n\nWhich is the largest?"),
        "a message without files": ("user_text.js", "userText", [{"content": "hi"}], "hi"),
        "no query": ("search.js", "find", [WHALE, " "], ""),
        "all words in the title": ("search.js", "find", [WHALE, "MORE animals"], ""),
        "a word in a file": ("search.js", "find", [WHALE, "animals elephant"],
            "elephant ``` whale ```"),
        "a word in an answer": ("search.js", "find", [WHALE, "blue"], "The blue whale."),
        "a word that is nowhere": ("search.js", "find", [WHALE, "animals shark"], None),
        "Markdown": ("export.js", "asMarkdown", [[WHALE]], MARKDOWN),
        "two as Markdown": ("export.js", "asMarkdown", [[empty, empty]],
            "# New chat\n\n---\n\n# New chat\n"),
        "a name": ("export.js", "fileName", [[WHALE], "md"], "Animals-more.md"),
        "a name without letters": ("export.js", "fileName", [[empty], "md"], "chat.md"),
        "a name for several": ("export.js", "fileName", [[WHALE, empty], "json"],
            "conversations.json"),
    }  # fmt: skip
    calls = [case[:3] for case in cases.values()]
    script = f"""const results = [];
      for (const [file, name, given] of {json.dumps(calls)})
        results.push((await import(`./${{file}}`))[name](...given));
      console.log(JSON.stringify(results));"""
    (tmp_path / "run.js").write_text(script)
    assert NODE is not None
    done = subprocess.run(
        [NODE, "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    for (name, case), result in zip(cases.items(), json.loads(done.stdout), strict=True):
        with subtests.test(name):
            assert result == case[3]
