"""Writes the digests that the tags of foreign images have now into all files that name one.

`make pin`, with Docker's buildx and a network. An image is written NAME:TAG@sha256:DIGEST; the tag
says to a reader what it is, the digest decides.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("Dockerfile", "*compose*.yml", "k8s/**/*.yaml")
# What builds and uses of an image look like: ARG PYTHON_IMAGE=..., image: ...
IMAGE = re.compile(
    r"(?P<before>_IMAGE=|\bimage: )(?P<tag>[a-z0-9./-]+:[A-Za-z0-9._-]+)(?:@sha256:[0-9a-f]{64})?"
)


def digest(tag: str) -> str:
    """Raises CalledProcessError if the registry does not know the tag."""
    words = ["docker", "buildx", "imagetools", "inspect", tag, "--format", "{{.Manifest.Digest}}"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def pin(text: str, known: dict[str, str]) -> str:
    """`known`: digests by tag, which grow."""

    def replaced(match: re.Match[str]) -> str:
        tag = match["tag"]
        if tag not in known:
            known[tag] = digest(tag)
        return f"{match['before']}{tag}@{known[tag]}"

    return IMAGE.sub(replaced, text)


def main() -> None:
    known: dict[str, str] = {}
    for path in (path for pattern in FILES for path in sorted(ROOT.glob(pattern))):
        before = path.read_text()
        after = pin(before, known)
        if after != before:
            path.write_text(after)
            print(f"{path.relative_to(ROOT)}: pinned")


if __name__ == "__main__":
    main()
