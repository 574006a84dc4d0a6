"""Line 4: 200 requests over all fields get byte-identical answers, usage and cached tokens too,
from a system with separate prefill and from one whose decode workers compute prompts."""

import json
import sys

import httpx
from fleet import Fleet
from matrix import ask, requests

MODEL = "SmolLM2-135M-Instruct"
COMMON = ("--decode", "1", "--kv-tokens", "32768", "--open-metrics")
SHOWN = 5  # differences that are printed


def answers(*options: str) -> tuple[list[str], int, int]:
    """One text an answer, and how many prompts were prefilled "remote" and "local"."""
    with Fleet(*COMMON, *options) as fleet:
        with httpx.Client(base_url=fleet.url, timeout=300) as client:
            found = [json.dumps(ask(client, *one), sort_keys=True) for one in requests(MODEL)]
        return found, fleet.prefills("remote"), fleet.prefills("local")


def main() -> int:
    asked = requests(MODEL)
    split, remote, _ = answers("--prefill", "1", "--remote-prefill", "always")
    mixed, mixed_remote, _ = answers("--prefill", "0")
    unlike = [i for i, pair in enumerate(zip(split, mixed, strict=True)) if pair[0] != pair[1]]
    errors = sum(json.loads(answer)[0] != 200 for answer in mixed)
    figures = {
        "ok": not unlike and remote > len(asked) / 2 and not mixed_remote and not errors,
        "requests": len(asked),
        "unlike": len(unlike),
        "prefilled_remotely": remote,
        "errors": errors,
        "examples": [[asked[i][1], split[i][:500], mixed[i][:500]] for i in unlike[:SHOWN]],
    }
    print(json.dumps(figures))
    return not figures["ok"]


if __name__ == "__main__":
    sys.exit(main())
