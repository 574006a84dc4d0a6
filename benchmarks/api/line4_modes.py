"""Line 4: at least 200 requests over all fields get byte-identical answers, including usage and
cached tokens, from a system with separate prefill and from one whose decode workers compute
prompts."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import httpx
from matrix import Request, needs_thoughts, needs_tools, paths, requests
from replies import ask
from systems.fleet import Fleet

MODEL = "SmolLM2-135M-Instruct"
COMMON = ("--decode", "1", "--kv-tokens", "32768", "--open-metrics")
LEAST = 200  # requests
SHOWN = 5  # differences that are printed
CACHED = re.compile(r'"(cached_tokens|cache_read_input_tokens)": [1-9]')


def answers(asked: Sequence[Request], *options: str) -> tuple[list[str], int]:
    """The text of each answer, and the number of remote prefills. Requests about thoughts go to a
    gateway that parses thoughts, although the model's template shows none."""
    found: dict[int, str] = {}
    remote = 0
    for thinks, more in ((False, ()), (True, ("--reasoning-parser", "think"))):
        with Fleet(*COMMON, *options, *more) as fleet:
            with httpx.Client(base_url=fleet.url, timeout=300) as client:
                for i, (path, body) in enumerate(asked):
                    if needs_thoughts(body) == thinks:
                        found[i] = json.dumps(ask(client, path, body))
            remote += fleet.prefills("remote")
    return [found[i] for i in range(len(asked))], remote


def refusals(asked: Sequence[Request], found: Sequence[str]) -> dict[str, Any]:
    """Answers other than 200: an answer that is an error in both modes proves nothing."""
    errors = [(one, json.loads(text)) for one, text in zip(asked, found, strict=True)]
    wrong = [(path, body, answer) for (path, body), answer in errors if answer[0] != 200]
    others = [(path, sorted(body), answer) for path, body, answer in wrong if not needs_tools(body)]
    return {
        "errors": len(wrong),
        "errors_of_tools": len(wrong) - len(others),
        "other_errors": others[:SHOWN],
    }


def main() -> int:
    asked = requests(MODEL)
    split, remote = answers(asked, "--prefill", "1", "--remote-prefill", "always")
    mixed, mixed_remote = answers(asked, "--prefill", "0")
    unlike = [i for i, pair in enumerate(zip(split, mixed, strict=True)) if pair[0] != pair[1]]
    refused = refusals(asked, mixed)
    apart = remote > len(asked) / 2 and not mixed_remote
    cached = sum(bool(CACHED.search(answer)) for answer in mixed)
    enough = len(asked) >= LEAST and cached > LEAST / 4
    figures = {
        "ok": not unlike and not refused["errors"] and apart and enough,
        "requests": len(asked),
        "paths": paths(asked),
        "unlike": len(unlike),
        "prefilled_remotely": remote,
        "with_cached_tokens": cached,
        **refused,
        "examples": [[asked[i], split[i][:500], mixed[i][:500]] for i in unlike[:SHOWN]],
    }
    print(json.dumps(figures))
    return not figures["ok"]


if __name__ == "__main__":
    sys.exit(main())
